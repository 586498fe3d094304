"""Slurm-native asynchronous RL post-training.

One trajectory, in reading order:

    data.source               a prompt group is drawn from the data; its ordinal names it for ever
    bus.staleness             may its batch start, given the policy the engine holds?
    roles.rollout             an engine samples G siblings, a reward scores them
    bus.producer              groups become an immutable shard; the log record makes it exist
    bus.sequencer             the batch of step b is decided, once, and written down
    roles.dealing             rewards become advantages (algorithms.advantages), by the index alone
    bus.reader                the rows of the batch are read where they are needed
    roles.actor               one optimizer step, one new policy: `trainer.megatron` packs rows
                              (packing), runs forward and backward (updates, schedule), asks
                              `algorithms.composition` for the loss, and steps (adam)
    weights.publish           engines pause in place, receive version b, go on
    bus.sequencer (credits)   the checkpoint covers the batch; its owner deletes the shard

`schema.COLUMNS` says which role writes which array. `docs/tutorials/tour.md`
shows what each stop leaves on disk, and `tests/unit/test_tour.py` runs the circle.

The names below are what a user's file, script or notebook imports; everything else is private. They
are imported when they are asked for, so that `import relax_hpc` costs nothing.
"""

from typing import TYPE_CHECKING

_MODULES = {
    "Advantage": "relax_hpc.algorithms.part",
    "ConfigError": "relax_hpc.errors",
    "Correction": "relax_hpc.algorithms.part",
    "Engines": "relax_hpc.environments.rewards.engines",
    "Environment": "relax_hpc.environments.session",
    "FinishReason": "relax_hpc.schema",
    "Loss": "relax_hpc.algorithms.part",
    "Needs": "relax_hpc.algorithms.part",
    "Outcome": "relax_hpc.environments.session",
    "Prompt": "relax_hpc.data.source",
    "RelaxError": "relax_hpc.errors",
    "Reply": "relax_hpc.environments.session",
    "Rows": "relax_hpc.algorithms.part",
    "Run": "relax_hpc.runs.api",
    "RunStatus": "relax_hpc.runs.status",
    "Sample": "relax_hpc.environments.rewards.contract",
    "Score": "relax_hpc.environments.rewards.contract",
    "Session": "relax_hpc.environments.session",
    "TokenLoss": "relax_hpc.algorithms.part",
    "TokenWeights": "relax_hpc.algorithms.part",
    "Tokens": "relax_hpc.algorithms.part",
    "equal": "relax_hpc.environments.rewards.equality",
    "final_text": "relax_hpc.environments.rewards.answers",
    "last_box": "relax_hpc.environments.rewards.answers",
    "last_line": "relax_hpc.environments.rewards.answers",
    "last_tag": "relax_hpc.environments.rewards.answers",
    "marked": "relax_hpc.environments.rewards.answers",
    "mean_over": "relax_hpc.algorithms.segments",
    "serving": "relax_hpc.environments.chat_api.server",
    "spread_to": "relax_hpc.algorithms.segments",
    "submit": "relax_hpc.runs.api",
    "sum_over": "relax_hpc.algorithms.segments",
}
__all__ = tuple(_MODULES)

if TYPE_CHECKING:
    from relax_hpc.algorithms.part import Advantage as Advantage
    from relax_hpc.algorithms.part import Correction as Correction
    from relax_hpc.algorithms.part import Loss as Loss
    from relax_hpc.algorithms.part import Needs as Needs
    from relax_hpc.algorithms.part import Rows as Rows
    from relax_hpc.algorithms.part import TokenLoss as TokenLoss
    from relax_hpc.algorithms.part import Tokens as Tokens
    from relax_hpc.algorithms.part import TokenWeights as TokenWeights
    from relax_hpc.algorithms.segments import mean_over as mean_over
    from relax_hpc.algorithms.segments import spread_to as spread_to
    from relax_hpc.algorithms.segments import sum_over as sum_over
    from relax_hpc.data.source import Prompt as Prompt
    from relax_hpc.environments.chat_api.server import serving as serving
    from relax_hpc.environments.rewards.answers import final_text as final_text
    from relax_hpc.environments.rewards.answers import last_box as last_box
    from relax_hpc.environments.rewards.answers import last_line as last_line
    from relax_hpc.environments.rewards.answers import last_tag as last_tag
    from relax_hpc.environments.rewards.answers import marked as marked
    from relax_hpc.environments.rewards.contract import Sample as Sample
    from relax_hpc.environments.rewards.contract import Score as Score
    from relax_hpc.environments.rewards.engines import Engines as Engines
    from relax_hpc.environments.rewards.equality import equal as equal
    from relax_hpc.environments.session import Environment as Environment
    from relax_hpc.environments.session import Outcome as Outcome
    from relax_hpc.environments.session import Reply as Reply
    from relax_hpc.environments.session import Session as Session
    from relax_hpc.errors import ConfigError as ConfigError
    from relax_hpc.errors import RelaxError as RelaxError
    from relax_hpc.runs.api import Run as Run
    from relax_hpc.runs.api import submit as submit
    from relax_hpc.runs.status import RunStatus as RunStatus
    from relax_hpc.schema import FinishReason as FinishReason
else:

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module 'relax_hpc' has no attribute {name!r}")
        from importlib import import_module

        found = globals()[name] = getattr(import_module(_MODULES[name]), name)
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
