"""The model of a teacher, its column, its rows, and the prompts that it sees."""

import numpy as np
import numpy.typing as npt

from relax_hpc.config.run import RunConfig
from relax_hpc.config.teachers import columns_by_teacher
from relax_hpc.roles.scorer.build import Scoring
from relax_hpc.roles.teacher.prompts import Ints, PrivilegedPrompts, privileged_prompts
from relax_hpc.roles.teacher.routing import Scores, taught_by


class TeacherView:
    """The rows of a teacher, and what it sees of them: a `scorer.rank0.View`."""

    def __init__(self, scores: Scores, prompts: PrivilegedPrompts | None = None) -> None:
        self._scores, self._prompts = scores, prompts

    def scores(self, guids: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        return self._scores(guids)

    @property
    def sees_other_prompts(self) -> bool:
        return self._prompts is not None

    def prompt(self, index: int) -> Ints:
        assert self._prompts is not None
        return self._prompts[index]


def scoring_of(config: RunConfig, name: str) -> Scoring:
    """The teacher `name` of a job."""
    teacher = config.teachers[name]
    return Scoring(
        teacher.model(config.model),
        teacher.megatron(config.actor, name),
        columns_by_teacher(config.teachers)[name],
        TeacherView(taught_by(config, name), privileged_prompts(config, name)),
    )
