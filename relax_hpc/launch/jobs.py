"""What the two executors have in common: calls in, job objects out."""

import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from submitit.core.core import Job as SubmititJob
from submitit.core.utils import DelayedSubmission, JobPaths

from relax_hpc import permissions
from relax_hpc.errors import PeerTimeoutError
from relax_hpc.launch import script
from relax_hpc.launch.component import Restartable
from relax_hpc.launch.placement import Component

# submitit asks a job without a limit of its own whether it "timed out"; such a job never does.
_NO_LIMIT_MIN = 60 * 24 * 365

MAX_REQUEUES = 1000
"""Time limits a run may reach and go on; each needs a step of progress, so it is not endless."""

_SILENCE = re.compile(
    r"Unable to contact|Could not establish a configuration|timed out|[Cc]onnection (refused|reset)"
    r"|Zero Bytes|communication|Unable to resolve|[Cc]onnect failure|DNS SRV|No route to host"
)
"""What Slurm's commands say where the controller cannot be reached."""

J = TypeVar("J", bound=SubmititJob[Any])


@dataclass(frozen=True, slots=True)
class Call:
    """A function and the component whose every task runs it."""

    component: Component
    function: Callable[..., Any]
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def delayed(self) -> DelayedSubmission:
        submission = DelayedSubmission(Restartable(self.function), *self.args, **self.kwargs)
        limit = self.component.resources.time
        submission.set_timeout(script.minutes(limit) if limit else _NO_LIMIT_MIN, MAX_REQUEUES)
        return submission


class HetJob(Generic[J]):
    """All components of one job; each is a submitit job of its own."""

    def __init__(self, job_id: str, components: Sequence[J], end: Callable[[], None]) -> None:
        self.job_id = job_id
        self.components = list(components)
        self._end = end

    def done(self) -> bool:
        return all(component.done() for component in self.components)

    def wait(self, timeout_s: float) -> None:
        """Waits until every component has ended.

        Raises:
            PeerTimeoutError: some have not within `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        while not self.done():
            if time.monotonic() > deadline:
                waiting = [job.job_id for job in self.components if not job.done()]
                raise PeerTimeoutError(
                    f"components {', '.join(waiting)} have not ended in {timeout_s:.0f} s"
                )
            time.sleep(0.2)

    def results(self) -> list[list[Any]]:
        """What the tasks of each component returned; raises what one of them raised."""
        self._check_own()
        return [component.results() for component in self.components]

    def exceptions(self) -> list[BaseException | None]:
        self._check_own()
        return [component.exception() for component in self.components]

    def _check_own(self) -> None:
        """What they left is unpickled."""
        permissions.check_own(*(component.paths.folder for component in self.components))

    def cancel(self) -> None:
        """Ends every component."""
        self._end()


class HetExecutor(Protocol):
    """Submits one heterogeneous job; here or through Slurm."""

    def submit_het(self, calls: Sequence[Call], job: script.Job) -> HetJob[Any]: ...


def dump(calls: Sequence[Call], job: script.Job) -> list[Path]:
    """Pickles each call into the folder of its component."""
    pickles = []
    for index, call in enumerate(calls):
        folder = job.component_folder(index)
        folder.mkdir(parents=True, exist_ok=True)
        pickles.append(folder / f"{job.name}.pkl")
        call.delayed().dump(pickles[-1])
    return pickles


def name_pickles(pickles: Sequence[Path], job_id: str) -> None:
    """Gives the pickles the names under which the tasks look for them."""
    for path in pickles:
        JobPaths(path.parent, job_id).move_temporary_file(path, "submitted_pickle")


def output_of(command: Sequence[str], timeout_s: float = 60) -> "subprocess.CompletedProcess[str]":
    """Runs a short command of Slurm's, whose text comes in one language.

    One that is not here, or gives no answer in time, has failed like any other: see `words_of`.
    """
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        said = f"no answer in {timeout_s:.0f} s"
    except OSError as error:
        said = f"cannot be run: {error.strerror}"
    return subprocess.CompletedProcess(command, returncode=-1, stdout="", stderr=said)


def words_of(answer: "subprocess.CompletedProcess[str]") -> str:
    """Why a command failed, in one line that begins with its name."""
    name = Path(answer.args[0]).name
    said = [line.strip() for line in answer.stderr.splitlines() if line.strip()]
    lines = [re.sub(rf"^{name}: ((error|fatal): )?", "", line) for line in said]
    if is_silent(answer):
        lines = lines[-1:]  # before it, each of its tries
    return f"{name}: {'; '.join(lines) or f'exit code {answer.returncode}'}"


def is_silent(answer: "subprocess.CompletedProcess[str]") -> bool:
    """Whether a command failed because nobody answered it, and not because of what was asked."""
    return answer.returncode < 0 or bool(_SILENCE.search(answer.stderr))
