"""The functions that tests of algorithms over layouts run on ranks of a pool."""

from unittest import mock

import megatron_worker
import numpy as np
from megatron_worker import _state

from relax_hpc.algorithms.aggregation import row_weights
from relax_hpc.algorithms.algorithm import algorithm_of
from relax_hpc.algorithms.composition import objective_of
from relax_hpc.roles.dealing.micro_batches import own_rows, plan_micro_batches
from relax_hpc.roles.dealing.portions import split_groups


def train(rows, advantages, cases, num_portions=1):
    """(metrics, weights) after a step of each of these algorithms, one after the other.

    Args:
        rows: rising by guid.
        cases: keys of [algorithm].
    """
    found = []
    for keys in cases:
        found.append((step(rows, advantages, keys, num_portions), megatron_worker.weights()))
    return found


def step(rows, advantages, keys, num_portions=1, keeps_entropy=False):
    """The metrics of one step of an algorithm."""
    trainer, algorithm = _state["trainer"], algorithm_of(**keys)
    trainer._epochs_per_step = algorithm.epochs_per_step
    objective = objective_of(algorithm)
    if not keeps_entropy:
        trainer._notes.clear()
    groups = np.array([row.guid for row in rows])
    if algorithm.mini_batches > 1:  # they are of a whole batch
        num_portions = 1
    portions = np.array_split(np.arange(len(rows)), num_portions)
    for number, portion in enumerate(portions, 1):
        parts = split_groups(groups[portion], algorithm.mini_batches)
        dealt = [_deal(trainer, rows, portion[part]) for part in parts]
        mine, micro_batches = own_rows([batch for part in dealt for batch in part])
        trainer.accumulate(
            _weighed(rows, groups, algorithm, portion, advantages)[mine].tolist(),
            micro_batches,
            objective,
            last=number == num_portions,
            mini_batches=[len(part) for part in dealt] if len(dealt) > 1 else [],
        )
    return trainer.update()


def _weighed(rows, groups, algorithm, portion, advantages):
    """[rows], those of the portion with what is known of them before they are read."""
    found = np.empty(len(rows), object)
    lengths = np.array([len(rows[row].token_ids) - rows[row].prompt_len for row in portion])
    weighed = row_weights(algorithm.aggregation, lengths, groups[portion], 16)
    for place, row in enumerate(portion):
        columns = {"advantages": advantages[row]}
        if weighed is not None:
            columns |= {name: of_row[place] for name, of_row in weighed._asdict().items()}
        values = {name: np.asarray(value, np.float32) for name, value in columns.items()}
        found[row] = rows[row].with_columns(**values)
    return found


def _deal(trainer, rows, numbers):
    """Row numbers of this rank's micro-batches."""
    plan = plan_micro_batches(
        [len(rows[row].token_ids) for row in numbers],
        num_ranks=trainer.dp_size,
        budget=trainer._megatron.tokens_per_micro_batch,
        count_multiple_of=trainer._megatron.layout.micro_batches_multiple_of,
    )
    return [numbers[batch].tolist() for batch in plan[trainer.dp_rank]]


def gap(rows, advantages, keys):
    """(tokens, mean) of the gap to the sampler, told between the gradient and the update."""
    trainer, found = _state["trainer"], []
    update = trainer.update

    def and_measure():
        found.append(trainer.engine_gap())
        return update()

    with mock.patch.object(trainer, "update", and_measure):
        step(rows, advantages, keys)
    trainer.step = 0  # the policy that sampled, to whoever asks next
    return found[0].num_tokens, found[0].mean
