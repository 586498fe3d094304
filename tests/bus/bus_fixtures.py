"""Prompt groups to test with: everything about one follows from its guid."""

import numpy as np

from relax_hpc.bus import layout
from relax_hpc.bus.producer import Producer
from relax_hpc.bus.reader import Reader
from relax_hpc.bus.sequencer import Sequencer
from relax_hpc.bus.skips import GroupVerdict
from relax_hpc.runtime.paths import BusPaths
from relax_hpc.schema import FinishReason, MediaKind, Medium, PromptGroup, Trajectory

SIBLINGS = 2
PRODUCERS = ["rollout-0", "rollout-1"]
P = 4
"""Prompt groups of a step."""
TOKENS = 7 * SIBLINGS
"""Tokens of a group."""


def trajectory(guid, sibling, *, segment=0, version=0, prompt=3, response=4, reward=None):
    n = prompt + response
    rng = np.random.default_rng([guid, sibling, *[segment] * bool(segment)])
    mask = (np.arange(n) >= prompt).astype(np.uint8)
    return Trajectory(
        guid=guid,
        sibling=sibling,
        segment=segment,
        prompt_index=1000 - guid,
        seed=guid * 1_000_003 + sibling,
        token_ids=rng.integers(0, 50_000, n).astype(np.int32),
        prompt_len=prompt,
        loss_mask=mask,
        columns={"rollout_logprobs": (-rng.random(n) * mask).astype(np.float32)},
        version_runs=np.array([[prompt, version]] if response else [], np.int32).reshape(-1, 2),
        finish=FinishReason.STOP,
        reward=float(sibling) if reward is None else reward,
        turns=np.array([[0, 0], [prompt, 1]][: 2 if response else 1], np.int32),
    )


def group(guid, **kwargs):
    return PromptGroup(guid, [trajectory(guid, s, **kwargs) for s in range(SIBLINGS)])


def with_media(made):
    """A group whose prompts show an image and a video with its sound, which neighbours have in
    common; the sound is the same bytes as the video."""
    number = made.guid // 2
    rng = np.random.default_rng([7, number])
    photo, film = (rng.integers(0, 256, size + number).astype(np.uint8) for size in (3000, 2000))
    media = (
        Medium(MediaKind.JPEG, photo, (1, 4, number), bytes([number + 1] * 16)),
        Medium(MediaKind.MP4, film, (2, 2, number), bytes([number + 2] * 16), (0, 3, 7, 9), 0.75),
        Medium(MediaKind.MP4, film.copy(), (0, 0, 0), bytes([number + 3] * 16)),
    )
    spans = np.array([[0, 0, 1], [1, 1, 1], [2, 2, 1]], np.int32)
    rows = [row._replace(media=media, media_spans=spans) for row in made.trajectories]
    return made._replace(trajectories=rows)


def judge(index):
    """A group teaches if the rewards of its siblings differ; it is solved if all are 1."""
    rewards = index.rewards[index.segment == 0].reshape(-1, SIBLINGS)
    return [
        GroupVerdict(bool(group.min() < group.max()), bool(group.min() == 1), float(group.mean()))
        for group in rewards
    ]


def make_bus(root, producers=PRODUCERS, writers=None):
    paths = BusPaths(root / "bus")
    layout.create(paths, producers, {"run": "test"}, sidecar_writers=writers)
    return paths


def produce(paths, name, guids, *, per_shard=1, **kwargs):
    """Opens the producer, publishes what of `guids` it has not committed, closes it."""
    with Producer(paths, name, {"run": "test", "job": 7}) as producer:
        todo = [g for g in guids if g not in producer.committed]
        for lo in range(0, len(todo), per_shard):
            producer.put([group(g, **kwargs) for g in todo[lo : lo + per_shard]])


def produce_all(paths, guids, **kwargs):
    """The same by the owners of `guids`, or of so many."""
    guids = range(guids) if isinstance(guids, int) else guids
    for number, name in enumerate(PRODUCERS):
        produce(paths, name, [guid for guid in guids if guid % 2 == number], **kwargs)


def sequencer(paths, position=None, *, prompts_per_step=P, **kwargs):
    return Sequencer(paths, prompts_per_step=prompts_per_step, position=position, **kwargs)


def batch(seq, step):
    """A whole batch of what is there."""
    return whole_batch(seq, step, timeout_s=0)


def rows_of(paths, *records):
    """All trajectories of batches, as the actor reads them."""
    reader = Reader(paths)
    return [row for each in records for row in reader.rows(each, range(each.num_trajectories))]


def whole_batch(sequencer, step, *, timeout_s, on_wait=None):
    """The portions of `step`, asked for until the last as the trainer does, as one record."""
    portions = [sequencer.next_portion(step, timeout_s=timeout_s, on_wait=on_wait)]
    while not portions[-1].last:
        portions.append(sequencer.next_portion(step, timeout_s=timeout_s, on_wait=on_wait))
    assert [portion.portion for portion in portions] == list(range(len(portions)))
    sampled = [p.policy_version_min for p in portions if p.policy_version_min >= 0]
    return portions[-1]._replace(
        guids=[guid for portion in portions for guid in portion.guids],
        parts=[part for portion in portions for part in portion.parts],
        num_trajectories=sum(portion.num_trajectories for portion in portions),
        num_tokens=sum(portion.num_tokens for portion in portions),
        policy_version_min=min(sampled, default=-1),
        portion=0,
        sidecars={u: roles for portion in portions for u, roles in portion.sidecars.items()},
    )


def same(a, b):
    """Exact equality of two trajectories, dtypes included."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and same(a.values(), map(b.get, a))
    return all(
        (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes())
        if isinstance(x, np.ndarray)
        else same(x, y)
        if isinstance(x, dict)
        else x == y
        for x, y in zip(a, b, strict=True)
    )
