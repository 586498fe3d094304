"""`control/launch.json`: what `submit` started. Status, logs and cancel begin here."""

from dataclasses import dataclass
from pathlib import Path

from relax_hpc.errors import ConfigError
from relax_hpc.launch.process_id import ProcessId
from relax_hpc.paths import RunPaths
from relax_hpc.records import read_json


@dataclass(frozen=True, slots=True)
class LaunchedComponent:
    role: str
    job_id: str
    tasks: int
    folder: Path


@dataclass(frozen=True, slots=True)
class LaunchRecord:
    mode: str
    leader: str
    components: tuple[LaunchedComponent, ...]
    time: float
    controller: ProcessId | None
    """The process that runs the script of a local job."""

    @property
    def folder(self) -> Path:
        return self.components[0].folder.parent


def read(run_dir: Path) -> LaunchRecord:
    """Reads the record of a run.

    Raises:
        ConfigError: not a run directory, or nothing was started in it.
    """
    paths = RunPaths(run_dir)
    record = read_json(paths.launch_record)
    if record is None:
        reason = "has not been submitted" if paths.config.exists() else "is not a run directory"
        raise ConfigError(f"{run_dir}: {reason} (no {paths.launch_record.relative_to(run_dir)})")
    components = tuple(
        LaunchedComponent(each["role"], each["job_id"], each["tasks"], Path(each["folder"]))
        for each in record["components"]
    )
    controller = ProcessId(**record["controller"]) if "controller" in record else None
    return LaunchRecord(record["mode"], record["leader"], components, record["time"], controller)
