"""Routes rows to teachers by the source of a prompt, which follows from its guid."""

from collections.abc import Callable, Collection
from functools import reduce

import numpy as np
import numpy.typing as npt

from relax_hpc.config.run import RunConfig
from relax_hpc.data.order import Mixture
from relax_hpc.schema import Trajectory

Scores = Callable[[npt.NDArray[np.int64]], npt.NDArray[np.bool_]]


def taught_by(config: RunConfig, name: str) -> Scores:
    """Returns a function that tells whether a teacher has the prompts of given guids.

    The sources take turns by the run's seed alone (`data.order`), so no row has to be read.
    """
    every, own = config.prompts.mixture, set(config.teachers[name].sources)
    if own in (set(), set(every)):
        return lambda guids: np.ones(len(guids), bool)
    turns = Mixture([source.weight for source in every.values()], config.seed)
    is_own = np.array([source in own for source in every])
    return lambda guids: is_own[[turns[guid].source for guid in guids.tolist()]]


def of_its_teacher(row: Trajectory, columns: Collection[str]) -> Trajectory:
    """Returns the row with one column `teacher_logprobs`, from the teacher that scored it.

    Args:
        row: with the columns of all teachers; other teachers' values are nan.
        columns: of the teachers, by their names in the schema.
    """
    names = [name.split("/")[1] for name in columns]
    if len(names) < 2:
        return row
    found = reduce(np.fmax, [row.columns[name] for name in names])
    rest = {key: values for key, values in row.columns.items() if key not in names}
    return row._replace(columns={**rest, "teacher_logprobs": found})
