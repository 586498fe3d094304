"""Fakes beside a role, which note in one journal what they are given, in which order."""

import time
from types import SimpleNamespace

import numpy as np

from relax_hpc.bus.reader import BatchIndex
from relax_hpc.config import job_file
from relax_hpc.schema import FinishReason, Trajectory


class Journal(list):
    """Entries are tuples: what, and its values."""

    def note(self, *entry):
        self.append(entry)

    def of(self, *kinds):
        """The entries of some kinds, in order."""
        return [entry for entry in self if entry[0] in kinds]


class Events:
    rank = 0

    def __init__(self):
        self.all = []

    def emit(self, event, **fields):
        self.all.append((event, fields))

    def of(self, event):
        return [fields for name, fields in self.all if name == event]


def config(**sections):
    """A run's settings; `schedule__num_steps=3` sets schedule.num_steps."""
    tree = {
        "name": "test",
        "model": {"path": "model"},
        "prompts": {"train": "train"},
        "rollout": {"samples_per_prompt": 2},
        "schedule": {"num_steps": 2, "prompts_per_step": 2},
        "eval": {"heldout": {"path": "heldout", "every": 0}},
    }
    for key, value in sections.items():
        *path, name = key.split("__")
        section = tree
        for part in path:
            section = section.setdefault(part, {})
        section[name] = value
    return job_file.validate(tree, source="test")


def row(guid=0, sibling=0, prompt=2, response=3, version=0, mask=None, reward=0.0):
    """A trajectory whose tokens say whose they are and where they stand."""
    size = prompt + response
    runs = [[prompt, version]] if response else []
    if mask is None:
        mask = [0] * prompt + [1] * response
    return Trajectory(
        guid=guid, sibling=sibling, prompt_index=guid, seed=0,
        token_ids=(100 * guid + 10 * sibling + np.arange(size)).astype(np.int32),
        prompt_len=prompt, loss_mask=np.array(mask, np.uint8),
        columns={"rollout_logprobs": np.zeros(size, np.float32)},
        version_runs=np.array(runs, np.int32).reshape(-1, 2),
        finish=FinishReason.STOP, reward=reward,
    )  # fmt: skip


def index_of(rows):
    """The row columns of trajectories, as a reader gives them."""
    columns = {
        name: np.array([getattr(row, name) for row in rows])
        for name in (
            "guid", "sibling", "segment", "reward_error", "prompt_len", "policy_version_min",
            "policy_version_max", "finish",
        )
    }  # fmt: skip
    lengths = np.array([len(row.token_ids) for row in rows])
    rewards = np.array([row.reward for row in rows], np.float32)
    return BatchIndex(**columns, rewards=rewards, response_len=lengths - columns["prompt_len"])


def sampled(token_ids, logprobs, version_runs, finish=FinishReason.STOP, routed_experts=None):
    """An engine's response to a prompt."""
    return SimpleNamespace(
        token_ids=token_ids, logprobs=logprobs, version_runs=version_runs,
        finish=finish, routed_experts=routed_experts,
    )  # fmt: skip


class Rank1:
    """A world as a further rank sees it: rank 0's values come out of a list."""

    rank, size = 1, 2

    def __init__(self, told, replica=None):
        self.told, self.replica, self.given = list(told), replica, []

    def bcast(self, value):
        return self.told.pop(0)

    def split(self, color):
        assert color == 1
        return self.replica

    def allgather(self, value):
        self.given.append(value)
        return [{}, value]


class NobodyElse:
    """The ranks of a world as one sees them that helps to publish: it keeps what comes out."""

    def __init__(self, journal):
        self.journal = journal

    def publish(self, tensors):
        given = dict(tensors)
        self.journal.note("help", given.get("w"), given)


class CheckpointPart:
    def __init__(self, files):
        self.files = files

    def write(self, folder):
        for name, content in self.files.items():
            (folder / name).write_text(content)

    def write_names(self, folder, *, timeout_s, cancelled):
        return sum(path.stat().st_size for path in folder.iterdir())


def wait_for(condition, timeout_s=60):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
