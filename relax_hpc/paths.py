"""Every path under a run directory. Nobody else joins strings into paths."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from relax_hpc.storage import names


@dataclass(frozen=True, slots=True)
class BusPaths:
    """The bus below a run directory; the layout is described in docs/bus.md."""

    root: Path

    @property
    def header(self) -> Path:
        return self.root / "RUN.json"

    @property
    def plan(self) -> Path:
        return self.root / "plan"

    @property
    def credits(self) -> Path:
        """The sequencer's growing log of what rollout may start and what owners may delete."""
        return self.root / "ctl" / "credits"

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
        """Names the log of a task, by its rank, or that of a node, see `nodes`."""
        return self.folder / f"{self.job_id}_{place}_log.{stream}"

    def nodes(self) -> list[str]:
        """Lists nodes with a log of what was printed there before tasks had their own: by an
        interpreter that does not start, and by Slurm."""
        begin, end = f"{self.job_id}_", "_log.err"
        names = {path.name[len(begin) : -len(end)] for path in self.folder.glob(f"{begin}*{end}")}
        return sorted(name for name in names if not name.isdecimal())

    def done(self, rank: int) -> Path:
        """Empty; is there once a task has returned, until its step starts again."""
        return self.folder / f"{self.job_id}_{rank}_done"

    def final(self, rank: int) -> Path:
        """Empty; a task has failed in a way that a restart does not cure."""
        return self.folder / f"{self.job_id}_{rank}_final"

    @property
    def step(self) -> Path:
        """The Slurm step that runs the tasks, where it runs those of other components too."""
        return self.folder / f"{self.job_id}_step"

    @property
    def processes(self) -> Path:
        """The processes that run the tasks on this machine, where there is no Slurm."""
        return self.folder / f"{self.job_id}_processes.json"


@dataclass(frozen=True, slots=True)
class RunPaths:
    """A run directory."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "run.json"

    @property
    def secret(self) -> Path:
        """The secret of the run, for its owner alone; see `run_secret`."""
        return self.root / "secret"

    @property
    def bus(self) -> BusPaths:
        return BusPaths(self.root / "bus")

    @property
    def programs(self) -> Path:
        """Copies of the user's programs that the job names."""
        return self.root / "programs"

    @property
    def control(self) -> Path:
        return self.root / "control"

    @property
    def reserve(self) -> Path:
        """Room for small records on a full file system; given back by who finds it full."""
        return self.control / "reserve"

    @property
    def launch_record(self) -> Path:
        """The Slurm job (or local process) of each component; written by `submit`, `resume`."""
        return self.control / "launch.json"

    def launch_claim(self, number: int) -> Path:
        """Claim of who starts the run for the second time, the third, ...; made by one process
        only."""
        return self.control / f"launch-{number}.json"

    def config_before(self, number: int) -> Path:
        """The job as it was before the start of that number changed it."""
        return self.control / f"run-before-{number}.json"

    @property
    def scale(self) -> Path:
        """Requests to add or remove engines, and what came of them."""
        return self.control / "scale"

    @property
    def scale_state(self) -> Path:
        return self.scale / "state.json"

    @property
    def extras(self) -> Path:
        """Ids of the members that were added while the run ran."""
        return self.scale / "extras.json"

    def scale_request(self, number: int) -> Path:
        return self.scale / f"request-{number:06d}.json"

    def scale_cancel(self, number: int) -> Path:
        """Says that a request is not wanted any more."""
        return self.scale / f"cancel-{number:06d}.json"

    def drain(self, member: str) -> Path:
        """Tells the owner of an added engine to drain and end it."""
        return self.scale / f"drain-{member}.json"

    @property
    def roster(self) -> Path:
        """The engines and the weights they hold; written by the trainer."""
        return self.control / "weights.json"

    def switch(self, member: str, start: str, version: int) -> Path:
        """State of the requests of one start of an engine when it got a version."""
        return self.switches(member) / start / f"{version}.json"

    def switches(self, member: str) -> Path:
        """`switch` of all starts of an engine."""
        return self.control / "switches" / member

    @property
    def lease(self) -> Path:
        """Holder of the GPUs that trainer and engines have in common; written by the trainer."""
        return self.control / "lease.json"

    def heldout_shares(self, rank: int, tasks: int) -> Path:
        """Scores of a rollout task, one of `tasks`, on its shares of the held-out sets."""
        return self.control / "heldout" / f"{rank}-of-{tasks}.json"

    def prompt_rows(self, rank: int) -> Path:
        """Findings of a rollout task about its share of the rows of data."""
        return self.control / "prompts" / f"{rank}.json"

    @property
    def decided_rows(self) -> Path:
        """Rows that cannot be used, as was decided when the rollout tasks first started."""
        return self.control / "prompts" / "left-out.json"

    @property
    def broken_media(self) -> Path:
        """Rows of data that are left out for their media, as was decided at submission."""
        return self.control / "prompts" / "broken-media.json"

    @property
    def left_out(self) -> Path:
        """Rows of data that the run leaves out, each with the reason."""
        return self.root / "left_out.jsonl"

    def eval_rows(self, name: str, version: int, when: str, number: int, rank: int) -> Path:
        """Samples that a rollout task scored for one evaluation of a held-out set."""
        return self.root / "eval" / name / f"{version:06d}-{when}-{number}.{rank}.jsonl"

    def eval_part(self, name: str, when: str, number: int, rank: int, tasks: int) -> Path:
        """Samples of an evaluation that is under way; a task that is started again goes on."""
        return self.root / "eval" / name / f"{when}-{number}.{rank}-of-{tasks}.part"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def critic_checkpoints(self) -> Path:
        """Checkpoints of the critic, which are not of the same steps as the actor's."""
        return self.root / "critic"

    @property
    def exported_model(self) -> Path:
        """Hugging Face folder that supervised fine-tuning leaves at its end."""
        return self.root / "model"

    @property
    def tensorboard(self) -> Path:
        return self.root / "tensorboard"

    @property
    def tensorboard_made(self) -> Path:
        """Names the file that `tensorboard` was left with, and the events that it shows."""
        return self.control / "tensorboard.json"

    def exported(self, service: str) -> Path:
        """Name of the run at a service that shows curves, and what it was sent."""
        return self.control / f"export-{service}.json"

    @property
    def notified(self) -> Path:
        """Times of the newest message of each occasion."""
        return self.control / "notified.json"

    def ending(self, attempt: str) -> Path:
        """Says that Slurm has announced the end of an attempt of the job."""
        return self.control / f"ending-{attempt}.json"

    def all_endings(self) -> dict[str, Path]:
        """Returns these records by attempt."""
        found = self.control.glob("ending-*.json")
        return {path.stem.removeprefix("ending-"): path for path in found}

    def cancelled(self, job_id: str) -> Path:
        """Says that a job was told to end for good: nobody may requeue it."""
        return self.control / f"cancelled-{job_id}.json"

    def saves(self, attempt: str) -> Path:
        """Says that a trainer will save at that end, and which step it has saved."""
        return self.control / f"saves-{attempt}.json"

    def critic_saves(self, attempt: str) -> Path:
        """The same of the critic."""
        return self.control / f"saves-critic-{attempt}.json"

    def collectives(self, start_id: str) -> Path:
        """Record of the collectives of a rank; torch adds its number to the name."""
        return self.root / "logs" / f"nccl-{start_id}-"

    def hangs(self, start_id: str) -> Path:
        """Word of the watchdogs of one start of a component, about ranks that seem to hang."""
        return self.control / "hangs" / start_id

    @property
    def doing(self) -> Path:
        """Records of what every task is doing."""
        return self.control / "doing"

    def keeps(self, attempt: str, rank: int) -> Path:
        """Says that a rollout task will keep what it has of responses, and whether it has."""
        return self.control / f"keeps-{attempt}-{rank}.json"

    def all_keeps(self, attempt: str) -> list[Path]:
        """Returns these records of all rollout tasks that have begun."""
        of_it = re.compile(rf"keeps-{re.escape(attempt)}-\d+\.json")
        return [self.control / name for name in names(self.control) if of_it.fullmatch(name)]

    def idle(self, attempt: str, task: str) -> Path:
        """Says since when a task has nothing to do, where its job gives nodes back for that."""
        return self.control / f"idle-{attempt}-{task}.json"

    def skips(self, number: int) -> Path:
        """Says which groups of a rollout task teach nothing, while there is no trainer."""
        return self.control / f"skips-{number}.json"

    def away(self, side: str) -> Path:
        """Says in which attempt the job of a side is about to give its nodes back."""
        return self.control / f"away-{side}.json"

    @property
    def snapshot(self) -> Path:
        """The newest weights for engines that load them by themselves; written by the trainer."""
        return self.control / "snapshot.json"

    @property
    def verdict(self) -> Path:
        """The last verdict on the run; written by whoever supervises its job."""
        return self.control / "verdict.json"

    def replay(self, step: int, number: int) -> "RunPaths":
        """A small run directory in which a step was trained again."""
        return RunPaths(self.root / "replay" / f"step_{step}-{number}")

    @property
    def replayed(self) -> Path:
        """The step that is trained again in this directory, and what of which run."""
        return self.control / "replay.json"

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"

    @property
    def reward_curve(self) -> Path:
        return self.root / "reward.png"

    @property
    def loss_curve(self) -> Path:
        """The curve of supervised fine-tuning, in place of the reward's."""
        return self.root / "loss.png"

    @property
    def timeline(self) -> Path:
        return self.root / "timeline.png"

    @property
    def view(self) -> Path:
        """The page of trajectories that `relax-hpc view` writes."""
        return self.root / "view.html"

    @property
    def submission(self) -> Path:
        """Scripts, and what they print; a folder for every component."""
        return self.root / "submission"

    def component(self, name: str) -> Path:
        """Logs of a component's tasks, and how they ended; see `ComponentPaths`."""
        return self.submission / name

    def hf(self, step: int) -> Path:
        """The model of a step as a Hugging Face folder."""
        return self.root / "hf" / f"step_{step}"

    @property
    def weights(self) -> Path:
        """Folder of the snapshots that engines load."""
        return self.root / "weights"

    @property
    def members(self) -> Path:
        return self.root / "members"

    def member(self, member: str) -> Path:
        return self.members / f"{member}.json"

    @property
    def events_folder(self) -> Path:
        return self.root / "events"

    def events(self, role: str, rank: int) -> Path:
        return self.events_folder / f"{role}-{rank}.jsonl"

    def log(self, role: str, name: str) -> Path:
        return self.root / "logs" / f"{role}-{name}.log"

    def engine_log(self, member: str, start: str) -> Path:
        """Output of one start of an engine."""
        return self.log("engine", f"{member}-{start}")

    def engine_call(self, member: str) -> Path:
        """Orders of the host of an engine over several nodes to its other parts."""
        return self.control / f"engine-{member}.json"

    def engine_part(self, member: str, part: int) -> Path:
        """Outcome of a part of such an engine."""
        return self.control / f"engine-{member}-{part}.json"

    def rendezvous(self, name: str) -> Path:
        return self.control / f"rendezvous-{name}.json"
