"""The way in which a run is started, and what can be two jobs."""

from typing import TYPE_CHECKING, Literal

from relax_hpc.sections import NonNegative, Positive, Section, UserPath

if TYPE_CHECKING:
    from relax_hpc.config.run import RunConfig


class LaunchConfig(Section):
    bootstrap: Literal["auto", "mpi", "mpi_job", "files"] = "auto"
    """Way in which ranks of a component find each other; auto is mpi when `resources.mpi` is set,
    but for tasks of engines that are on one node each: every task is a step of its own then.
    mpi_job: all components are one step and one MPI world, so that a rank that dies restarts all of
    them."""
    layout: Literal["hetjob", "separate"] = "hetjob"
    """hetjob: all components are one job. separate: rollout with its engines, and the actor with
    all that it trains or scores with, are a job each. They need not run at the same time, and
    meet in the run directory alone; `weights.transport` is files then."""
    idle_s: Positive = 300
    """With layout separate, seconds that a side has nothing to do before it gives its nodes back;
    it is started again when the other side has made work for it."""
    profile: str | None = None
    """Site profile: a name in ~/.config/relax-hpc, one that comes along (example, local), or a path
    to a TOML file. Unset is `$RELAX_PROFILE`, then ~/.config/relax-hpc/default.toml."""
    max_restarts: NonNegative = 3
    """Times within half an hour that a component whose step failed is started again in place:
    after half a second, then after twice as long each time, 30 s at most. What failed while Slurm's
    controller did not answer is not counted."""
    peer_timeout_s: Positive = 1800
    """Seconds that a role waits for another before it gives up, naming it."""
    hang_timeout_s: Positive = 300
    """Seconds without a sign of life, or stopped, after which a task hangs and is ended. A phase
    that takes longer may take 5 times as long as the longest that was seen, and one that is new
    peer_timeout_s."""
    share: Literal["none", "group"] = "none"
    """Readers of the run directory besides you. group: your Unix group, tokens excepted. Nobody
    else may ever write there, whatever your umask."""
    kernel_cache: UserPath | None = None
    """Folder in which kernels that torch, Triton, SGLang, FlashInfer, DeepGEMM, TVM and CUDA
    compile are kept, a folder per set of their versions; yours alone, made if it is not there.
    Unset, torch's are in the node's temporary folder, the others in the caches of your home."""


def check_layout(config: "RunConfig") -> None:
    """Refuses what needs both sides at the same time, if they are to be jobs of their own.

    Raises:
        ValueError: names the key and the remedy.
    """
    if config.launch.layout != "separate":
        return
    apart = "with launch.layout = 'separate'"
    pool, weights = config.rollout_pool, config.weights
    if pool.placement != "own":
        raise ValueError(
            f"engines.rollout.placement = {pool.placement!r}: {apart} engines and actor have no "
            "GPUs in common; use 'own'"
        )
    if weights.transport != "files":
        raise ValueError(
            f"weights.transport = {weights.transport!r}: {apart} nobody may be there to receive a "
            "broadcast; use 'files'"
        )
    if config.launch.bootstrap == "mpi_job":
        raise ValueError(
            f"launch.bootstrap = 'mpi_job': {apart} there is no step of all components; use 'mpi'"
        )
    if config.prompts.retire_after:
        raise ValueError(
            f"prompts.retire_after = {config.prompts.retire_after}: {apart} the trainer may not be "
            "there to tell which prompts are solved; use 0"
        )
    if weights.quantize != "none":
        raise ValueError(
            f"weights.quantize = {weights.quantize!r}: {apart} engines begin before the trainer "
            "has written anything; use 'none'"
        )
    if config.model.weights is not None:
        raise ValueError(
            f"model.weights = '{config.model.weights}': {apart} engines begin with the model in "
            "model.path; convert it (relax-hpc convert --to hf) and name that in model.path"
        )
