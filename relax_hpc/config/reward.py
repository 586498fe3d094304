"""The score of a response."""

from typing import Annotated

from pydantic import Field

from relax_hpc.sections import Number, Positive, Section


class RewardConfig(Section):
    name: str = "boxed_number"
    """Function that scores a response: one that is built in, or your own "file.py:function" or
    "package.module:function"; see docs/rewards.md."""
    deadline_s: Annotated[Number, Field(gt=0)] = 10.0
    """Seconds for one sample, or one group if the reward sees it whole; later is 0 and an error."""
    memory_gib: Annotated[Number, Field(ge=0.25)] = 2.0
    """Memory of a process that scores; it is replaced when it keeps half of that."""
    solved_at: Number = 1.0
    """A prompt whose responses all reach it counts as solved, in `groups/solved` of a step."""
    workers: Positive = 2
    """Processes of each rollout task that score, beside a spare one."""
