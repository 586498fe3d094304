"""Every path under a run directory. Nobody else joins strings into paths."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from relax_hpc.runtime.files.storage import names


class _Below:
    """Declares a name below the root; the text after it says what lies there."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, paths: "BusPaths | RunPaths", owner: type) -> Path:
        return paths.root / self._name


@dataclass(frozen=True, slots=True)
class BusPaths:
    """The bus below a run directory; the layout is described in docs/reference/bus.md."""

    root: Path

    header = _Below("RUN.json")
    plan = _Below("plan")
    credits = _Below("ctl/credits")
    """The sequencer's growing log of what rollout may start and what owners may delete."""

    def producer(self, producer: str) -> Path:
        return self.root / "p" / producer

    def log(self, producer: str) -> Path:
        return self.producer(producer) / "log"

    def fence(self, producer: str, fence: int) -> Path:
        return self.producer(producer) / f"f{fence}"

    def shard(self, producer: str, fence: int, seq: int) -> Path:
        return self.fence(producer, fence) / f"{seq:012d}.h5"

    def plan_claim(self, fence: int) -> Path:
        return self.plan / f"FENCE.{fence:06d}"

    def plan_log(self, fence: int) -> Path:
        return self.plan / f"f{fence:06d}.log"

    def plan_snapshot(self, fence: int, records: int) -> Path:
        return self.plan / f"snap.{records:012d}.{fence:06d}.json"


@dataclass(frozen=True, slots=True)
class ComponentPaths:
    """Files that the tasks of a component leave in its folder; names begin with the id of the
    job."""

    folder: Path
    job_id: str

    def log(self, place: int | str, stream: Literal["out", "err"]) -> Path:
        """Output of a task, by rank; by node, of what ran before the tasks did."""
        return self.folder / f"{self.job_id}_{place}_log.{stream}"

    def nodes(self) -> list[str]:
        """Lists nodes with a log of what was printed there before tasks had their own: by an
        interpreter that does not start, and by Slurm."""
        begin, end = f"{self.job_id}_", "_log.err"
        names = {path.name[len(begin) : -len(end)] for path in self.folder.glob(f"{begin}*{end}")}
        return sorted(name for name in names if not name.isdecimal())

    def done(self, rank: int) -> Path:
        """Empty: the task returned, and its step has not started again."""
        return self.folder / f"{self.job_id}_{rank}_done"

    def final(self, rank: int) -> Path:
        """Empty: the task failed in a way that no restart cures."""
        return self.folder / f"{self.job_id}_{rank}_final"

    @property
    def step(self) -> Path:
        """The Slurm step of the tasks, if it runs several components."""
        return self.folder / f"{self.job_id}_step"

    @property
    def processes(self) -> Path:
        """The processes of the tasks, without Slurm."""
        return self.folder / f"{self.job_id}_processes.json"


@dataclass(frozen=True, slots=True)
class RunPaths:
    """A run directory."""

    root: Path

    config = _Below("run.json")
    """The job with every default and absolute paths."""
    secret = _Below("secret")
    """Tokens and keys follow from it; only its owner can read it."""

    @property
    def bus(self) -> BusPaths:
        return BusPaths(self.root / "bus")

    programs = _Below("programs")
    """Copies of your programs and of the modules beside them that they import."""
    control = _Below("control")
    reserve = _Below("control/reserve")
    """1 MiB that is freed for small records on a full file system."""
    launch_record = _Below("control/launch.json")
    """Slurm jobs or processes, versions, git revision."""

    def launch_claim(self, number: int) -> Path:
        """Claim of the n-th start; one process makes it."""
        return self.control / f"launch-{number}.json"

    def config_before(self, number: int) -> Path:
        """The job before the n-th start changed it."""
        return self.control / f"run-before-{number}.json"

    scale = _Below("control/scale")
    """Requests to add or remove engines, and their results."""
    scale_state = _Below("control/scale/state.json")
    extras = _Below("control/scale/extras.json")
    """Ids of added engines."""

    def scale_request(self, number: int) -> Path:
        return self.scale / f"request-{number:06d}.json"

    def scale_cancel(self, number: int) -> Path:
        """Withdraws a request."""
        return self.scale / f"cancel-{number:06d}.json"

    def drain(self, member: str) -> Path:
        """Tells the owner of an added engine to drain and end it."""
        return self.scale / f"drain-{member}.json"

    roster = _Below("control/weights.json")
    """Which engine holds which version; the trainer writes it."""

    def switch(self, member: str, start: str, version: int) -> Path:
        """Requests that an engine had in flight when it got a version."""
        return self.switches(member) / start / f"{version}.json"

    def switches(self, member: str) -> Path:
        """`switch` of all starts of an engine."""
        return self.control / "switches" / member

    lease = _Below("control/lease.json")
    """Who may use shared GPUs; the trainer writes it."""

    def heldout_shares(self, rank: int, tasks: int) -> Path:
        """Scores of a rollout task on its share of the held-out sets."""
        return self.control / "heldout" / f"{rank}-of-{tasks}.json"

    def prompt_rows(self, rank: int) -> Path:
        """Unusable rows in the share of a rollout task."""
        return self.control / "prompts" / f"{rank}.json"

    decided_rows = _Below("control/prompts/left-out.json")
    """Unusable rows, as decided for good at the first start."""
    broken_media = _Below("control/prompts/broken-media.json")
    """Rows left out for their media, as `submit` decided."""
    data_files = _Below("control/prompts/files.json")
    """The data that the run began with: rows, and size and time of change of each file."""
    left_out = _Below("left_out.jsonl")
    """Rows that the run leaves out, with reasons."""

    def eval_rows(self, name: str, version: int, when: str, number: int, rank: int) -> Path:
        """Held-out samples with texts, score and policies; `relax-hpc eval` reads them."""
        return self.root / "eval" / name / f"{version:06d}-{when}-{number}.{rank}.jsonl"

    def eval_part(self, name: str, when: str, number: int, rank: int, tasks: int) -> Path:
        """Samples of an evaluation under way."""
        return self.root / "eval" / name / f"{when}-{number}.{rank}-of-{tasks}.part"

    checkpoints = _Below("checkpoints")
    """`step_<step>`; kept ones in `kept/`, the best in `best/`, damaged ones in `torn/`."""
    critic_checkpoints = _Below("critic")
    """Checkpoints of the critic."""
    exported_model = _Below("model")
    """Model that supervised fine-tuning writes at its end."""
    tensorboard = _Below("tensorboard")
    """Curves."""
    tensorboard_made = _Below("control/tensorboard.json")
    """Events that TensorBoard shows."""

    def export(self, service: str) -> Path:
        """Points sent to a service for curves, and its name for the run."""
        return self.control / f"export-{service}.json"

    notified = _Below("control/notified.json")
    """Times of the newest messages."""

    def ending(self, attempt: str) -> Path:
        """The end of an attempt is announced."""
        return self.control / f"ending-{attempt}.json"

    def all_endings(self) -> dict[str, Path]:
        """Returns these records by attempt."""
        found = self.control.glob("ending-*.json")
        return {path.stem.removeprefix("ending-"): path for path in found}

    def cancellation(self, job_id: str) -> Path:
        """The job was cancelled: nobody may requeue it."""
        return self.control / f"cancelled-{job_id}.json"

    def saves(self, attempt: str) -> Path:
        """Step that the trainer saved for an announced end."""
        return self.control / f"saves-{attempt}.json"

    def critic_saves(self, attempt: str) -> Path:
        """Step that the critic saved for it."""
        return self.control / f"saves-critic-{attempt}.json"

    def collectives(self, start_id: str) -> Path:
        """Last collectives of a rank that hung; torch appends its number."""
        return self.root / "logs" / f"nccl-{start_id}-"

    def hangs(self, start_id: str) -> Path:
        """Ranks that seem to hang, reported by their watchdogs."""
        return self.control / "hangs" / start_id

    doing = _Below("control/doing")
    """The work of every task, rewritten every 30 s."""

    def keeps(self, attempt: str, rank: int) -> Path:
        """Whether a rollout task has kept its unfinished responses."""
        return self.control / f"keeps-{attempt}-{rank}.json"

    def all_keeps(self, attempt: str) -> list[Path]:
        """Returns these records of all rollout tasks that have begun."""
        of_it = re.compile(rf"keeps-{re.escape(attempt)}-\d+\.json")
        return [self.control / name for name in names(self.control) if of_it.fullmatch(name)]

    def idle(self, attempt: str, task: str) -> Path:
        """Two jobs: since when a task has nothing to do."""
        return self.control / f"idle-{attempt}-{task}.json"

    def skips(self, number: int) -> Path:
        """Two jobs: groups that teach nothing."""
        return self.control / f"skips-{number}.json"

    def away(self, side: str) -> Path:
        """Two jobs: attempt in which a side gives its nodes back."""
        return self.control / f"away-{side}.json"

    snapshot = _Below("control/snapshot.json")
    """Newest snapshot for engines that load files."""
    verdict = _Below("control/verdict.json")
    """The last failure or end, its cause, and the reaction."""

    def replay(self, step: int, number: int) -> "RunPaths":
        """Job, logs and events of a step that was trained again."""
        return RunPaths(self.root / "replay" / f"step_{step}-{number}")

    replayed = _Below("control/replay.json")
    """Within `replay/`: the step, and its run."""
    tags = _Below("control/tags.json")
    """Words by which a user finds the run again."""
    summary = _Below("summary.json")
    """Figures of the run, at its end."""
    reward_curve = _Below("reward.png")
    """The curve of the reward and of held-out sets."""
    loss_curve = _Below("loss.png")
    """The curve of supervised fine-tuning."""
    timeline = _Below("timeline.png")
    """Made by `relax-hpc timeline`."""
    view = _Below("view.html")
    """Made by `relax-hpc view`."""
    submission = _Below("submission")
    """Scripts and their output; a folder for every component."""

    def component(self, component: str) -> Path:
        """Logs of a component's tasks, and how they ended; see `ComponentPaths`."""
        return self.submission / component

    def hf(self, step: int) -> Path:
        """Model of a step as a Hugging Face folder."""
        return self.root / "hf" / f"step_{step}"

    weights = _Below("weights")
    """`v<version>-<unique>`: snapshots for engines that load files."""
    members = _Below("members")

    def member(self, member: str) -> Path:
        """An engine's address, start and state."""
        return self.members / f"{member}.json"

    events_folder = _Below("events")

    def events(self, role: str, rank: int) -> Path:
        """Events, one JSON object a line."""
        return self.events_folder / f"{role}-{rank}.jsonl"

    def log(self, role: str, name: str) -> Path:
        """Log from INFO on. `program-<rank>.log`: stderr of agents that failed. `hang-<task>.log`:
        stacks."""
        return self.root / "logs" / f"{role}-{name}.log"

    def engine_log(self, member: str, start: str) -> Path:
        """Output of one start of an engine."""
        return self.log("engine", f"{member}-{start}")

    def engine_call(self, member: str) -> Path:
        """Orders to the parts of an engine over several nodes."""
        return self.control / f"engine-{member}.json"

    def engine_part(self, member: str, part: int) -> Path:
        """Outcome of a part of an engine over several nodes."""
        return self.control / f"engine-{member}-{part}.json"

    def joined(self, member: str) -> Path:
        """Answer of an engine's task to an invitation into a weight group."""
        return self.control / f"joined-{member}.json"

    def rendezvous(self, name: str) -> Path:
        """Address at which ranks meet."""
        return self.control / f"rendezvous-{name}.json"
