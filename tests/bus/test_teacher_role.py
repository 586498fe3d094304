"""Teachers on a real bus: each writes what it is to teach, and may be killed."""

import numpy as np
import pytest
from bus_fixtures import PRODUCERS, SIBLINGS, produce, whole_batch
from test_scoring_role import Echo, open_rank0

from relax_hpc.bus import layout
from relax_hpc.bus.log import RecordKind, read_log
from relax_hpc.bus.reader import Reader
from relax_hpc.bus.sequencer import Sequencer
from relax_hpc.comm.world import SoloWorld
from relax_hpc.paths import BusPaths
from relax_hpc.roles.dealing.sight import Sight
from relax_hpc.roles.scorer import loop
from relax_hpc.roles.scorer.loop import behind, of_own
from relax_hpc.roles.teacher.routing import of_its_teacher
from relax_hpc.roles.teacher.scoring import TeacherView
from relax_hpc.telemetry.events import EventWriter

GROUPS = 12
WRITERS = {"one-0": "teacher", "two-0": "teacher_2"}
COLUMNS = ("ragged/teacher_logprobs", "ragged/teacher_logprobs_2")
HAS = {"one": lambda guids: guids % 3 == 0, "two": lambda guids: guids % 3 > 0}


class Prompts:
    """Those of the other prompts are the row's number, over and over, and longer than its own."""

    def __getitem__(self, index):
        return np.full(5, index, np.int32)


class Told(Echo):
    """Logprobs of a token are the one before it, negated, and 1000 times the first one."""

    def forward_logprobs(self, trajectories, micro_batches):
        assert not any(row.loss_mask[:5].any() for row in trajectories)
        super().forward_logprobs(trajectories, micro_batches)
        return [
            np.append(0, -row.token_ids[:-1] - 1000.0 * row.token_ids[0]).astype("f4")
            for row in trajectories
        ]


@pytest.fixture
def paths(tmp_path):
    made = BusPaths(tmp_path / "bus")
    layout.create(made, PRODUCERS, {}, sidecar_writers=WRITERS)
    for number, name in enumerate(PRODUCERS):
        produce(made, name, range(number, GROUPS, len(PRODUCERS)), per_shard=2)
    return made


def teach(paths, tmp_path, name, scorer=None, prompts=None):
    """Lets a teacher score until everything there is has been scored."""
    scorer, view = scorer or Echo(), TeacherView(HAS[name], prompts)
    with EventWriter(tmp_path / "events" / f"{name}-0.jsonl", name, 0) as events:
        mine = open_rank0(paths, events, name=name, column=COLUMNS[name == "two"], view=view)
        next_round = mine.next_round
        mine.next_round = lambda: next_round() if mine._writer.pending() else None
        loop.run(SoloWorld(), scorer, Reader(paths), mine, Sight(Reader(paths), None))
        mine.close()
    return scorer


def planned_rows(paths):
    needs = tuple(WRITERS.values())
    with Sequencer(paths, prompts_per_step=4, position=None, needs=needs) as sequencer:
        records = [whole_batch(sequencer, step, timeout_s=5) for step in (1, 2, 3)]
        reader = Reader(paths)
        return [t for r in records for t in reader.rows(r, range(r.num_trajectories))]


def test_each_teacher_scores_its_own_prompts_and_a_row_has_the_values_of_its_teacher(
    paths, tmp_path
):
    one, two = (teach(paths, tmp_path, name) for name in ("one", "two"))
    assert (one.rows, two.rows) == (GROUPS // 3 * SIBLINGS, GROUPS * 2 // 3 * SIBLINGS)
    rows = planned_rows(paths)
    assert len(rows) == GROUPS * SIBLINGS
    for row in rows:
        names = COLUMNS[::-1] if row.guid % 3 else COLUMNS
        mine, others = (row.columns[name.split("/")[1]] for name in names)
        assert np.array_equal(mine, -row.token_ids.astype("f4")) and np.isnan(others).all()
        found = of_its_teacher(row, COLUMNS).columns
        assert np.array_equal(found["teacher_logprobs"], mine)
        assert "teacher_logprobs_2" not in found and "rollout_logprobs" in found


def test_a_killed_teacher_goes_on_where_it_was_and_nothing_is_scored_twice(paths, tmp_path):
    teach(paths, tmp_path, "one")
    with pytest.raises(KeyError, match="killed"):
        teach(paths, tmp_path, "two", Echo(fail_after=1))
    done = [r.parent for r in read_log(paths.log("two-0")) if r.kind is RecordKind.SIDE]
    assert 0 < len(done) < GROUPS // 2
    teach(paths, tmp_path, "two")
    parents = [r.parent for r in read_log(paths.log("two-0")) if r.kind is RecordKind.SIDE]
    assert len(parents) == len(set(parents)) == GROUPS // 2
    for row in planned_rows(paths):
        found = of_its_teacher(row, COLUMNS).columns["teacher_logprobs"]
        assert np.array_equal(found, -row.token_ids.astype("f4"))


def test_a_privileged_teacher_sees_the_response_behind_a_prompt_of_its_own(paths, tmp_path):
    teach(paths, tmp_path, "one", Told(), Prompts())
    teach(paths, tmp_path, "two")
    taught = [row for row in planned_rows(paths) if row.guid % 3 == 0]
    for row in taught:
        ids, n, told = row.token_ids.astype("f8"), row.prompt_len, row.prompt_index
        before = np.append(told, ids[n:-1])  # the other prompt's last token, then its own
        found = row.columns["teacher_logprobs"]
        assert found[:n].tolist() == [0] * n
        np.testing.assert_array_equal(found[n:], (-before - 1000.0 * told).astype("f4"))


def test_another_prompt_leaves_the_response_as_it_is(paths, tmp_path):
    teach(paths, tmp_path, "one")
    teach(paths, tmp_path, "two")
    row = planned_rows(paths)[0]
    assert behind(None, row) is row
    for length in (1, 3, 9):
        seen = behind(np.arange(length, dtype=np.int32), row)
        assert seen.token_ids.tolist() == [*range(length), *row.token_ids[row.prompt_len :]]
        assert seen.loss_mask.tolist() == [0] * length + [1] * 4 and seen.prompt_len == length
        scored = of_own(row, np.arange(len(seen.token_ids), dtype=np.float32))
        assert scored[row.prompt_len :].tolist() == [*range(length, length + 4)]
        assert len(scored) == len(row.token_ids)
