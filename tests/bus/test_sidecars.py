"""Columns that other roles add: same rows, own shards, first one wins."""

import bus_fixtures
import numpy as np
import pytest
from bus_fixtures import SIBLINGS, P, batch, group, make_bus, produce, produce_all, rows_of

from relax_hpc.bus import layout, log
from relax_hpc.bus.log import RecordKind, read_log
from relax_hpc.bus.producer import Producer
from relax_hpc.bus.reader import Reader
from relax_hpc.bus.shards.shard_format import DTYPES
from relax_hpc.bus.sidecar import SidecarWriter
from relax_hpc.errors import BusError, DamagedError, PeerTimeoutError
from relax_hpc.schema import COLUMN_WRITERS, COLUMNS, Column

WRITERS = {"reference-0": "reference", "reference-1": "reference", "critic-0": "critic"}


@pytest.fixture
def paths(tmp_path):
    return make_bus(tmp_path, writers=WRITERS)


def sequencer(paths, needs=("reference", "critic")):
    return bus_fixtures.sequencer(paths, needs=needs)


def ref_logprobs(shard, shift=0.0):
    """A value that follows from the token it stands for."""
    return {"ragged/ref_logprobs": (-shard.read("ragged/token_ids") - shift).astype(np.float32)}


def widen(paths, name, **kwargs):
    """One pass of a sidecar writer; returns how many shards it widened."""
    with SidecarWriter(paths, name, {"job": 7}) as writer:
        todo = writer.pending()
        for pending in todo:
            with writer.open(pending) as shard:
                columns = ref_logprobs(shard, **kwargs)
                if writer.role == "critic":
                    columns = {"ragged/values": columns["ragged/ref_logprobs"] * 2}
            writer.put(pending, columns)
    return len(todo)


def widen_all(paths):
    for name in WRITERS:
        widen(paths, name)


def test_groups_may_come_as_late_as_they_like_but_not_the_columns_of_those_that_are_there(paths):
    """Rollout that is a job of its own may be absent; who adds columns is in the trainer's job."""
    polls = []

    def produce_late():
        polls.append(seq.lacks_groups())
        assert len(polls) < 500, "waits without end"
        if len(polls) == 10:  # each lasts longer than the patience
            produce_all(paths, P)

    with sequencer(paths) as seq, pytest.raises(PeerTimeoutError, match="reference-0 owes"):
        seq.next_portion(1, timeout_s=0.01, may_lack_groups=True, on_wait=produce_late)
    assert polls[:10] == [True] * 10


def test_a_batch_waits_for_the_columns_it_needs_and_comes_with_them(paths):
    produce_all(paths, P)
    with sequencer(paths) as seq:
        assert widen(paths, "reference-0") == 2  # the shards of rollout-0
        assert widen(paths, "critic-0") == 4
        with pytest.raises(PeerTimeoutError, match=r"reference-1 owes \[1, 3\] \(its log has 0"):
            batch(seq, 1)
        assert widen(paths, "reference-1") == 2
        record = batch(seq, 1)
        rows = Reader(paths).rows(record, [7, 0, 3])
    assert [(t.guid, t.sibling) for t in rows] == [(3, 1), (0, 0), (1, 1)]
    for trajectory in rows:
        assert np.array_equal(
            trajectory.columns["ref_logprobs"], -trajectory.token_ids.astype(np.float32)
        )
        assert np.array_equal(trajectory.columns["values"], 2 * trajectory.columns["ref_logprobs"])
        assert "teacher_logprobs" not in trajectory.columns
    with sequencer(paths) as seq:
        assert batch(seq, 1) == record


def test_only_writers_of_needed_columns_are_waited_for_and_read(paths):
    """The critic never writes: a job that needs no values goes on without it."""
    header = layout.open_bus(paths)
    assert layout.roles_of(header, ["ragged/values", "ragged/turns"]) == ("critic",)
    assert layout.roles_of(header, []) == ()
    needs = layout.roles_of(header, ["ragged/ref_logprobs"])
    assert needs == ("reference",)
    produce_all(paths, P)
    widen(paths, "reference-0")
    with sequencer(paths, needs=needs) as seq:
        with pytest.raises(PeerTimeoutError, match="reference-1 owes"):
            batch(seq, 1)
        widen(paths, "reference-1")
        record = batch(seq, 1)
    assert len(record.sidecars) == P
    assert all(list(roles) == ["reference"] for roles in record.sidecars.values())


def test_a_sidecar_of_unneeded_columns_is_not_even_opened(paths):
    produce_all(paths, P)
    widen_all(paths)
    with sequencer(paths) as seq:
        record = batch(seq, 1)
    for seq in range(P):
        paths.shard("critic-0", 1, seq).unlink()
    rows = Reader(paths).rows(record, range(8), columns=["ragged/ref_logprobs"])
    assert all("ref_logprobs" in row.columns for row in rows)
    with pytest.raises(DamagedError):
        Reader(paths).rows(record, range(8))


def test_a_restarted_writer_knows_what_it_has_done(paths):
    produce_all(paths, P)
    with SidecarWriter(paths, "reference-0", {}) as writer:
        (one, other) = writer.pending()
        with writer.open(one) as shard:
            writer.put(one, ref_logprobs(shard))
    with SidecarWriter(paths, "reference-0", {}) as writer:
        assert writer.pending() == [other]
    assert widen(paths, "reference-0") == 1
    assert widen(paths, "reference-0") == 0
    records = [r for r in read_log(paths.log("reference-0")) if r.kind is RecordKind.SIDE]
    assert [r.parent for r in records] == [one.record.uuid, other.record.uuid]
    assert {(r.role, r.rows) for r in records} == {("reference", SIBLINGS)}


def test_a_damaged_sidecar_is_made_again_and_the_run_goes_on(paths, caplog):
    produce_all(paths, P)
    for name in ("reference-0", "reference-1"):
        widen(paths, name)
    damaged = paths.shard("reference-0", 1, 0)
    damaged.write_bytes(damaged.read_bytes()[:100])
    with sequencer(paths, needs=["reference"]) as seq:
        with pytest.raises(PeerTimeoutError, match=r"reference-0 owes \[0\]"):
            batch(seq, 1)
        assert "is torn" in caplog.text
        assert "restart reference-0" in caplog.text
        assert widen(paths, "reference-0") == 1
        record = batch(seq, 1)
    assert all("ref_logprobs" in row.columns for row in rows_of(paths, record))


def test_what_is_known_of_shards_goes_with_them(paths):
    """A run has millions: two of each ten groups are kept here, whatever came before."""
    with SidecarWriter(paths, "reference-0", {}) as writer:
        for begin in range(0, 30, 10):
            produce(paths, "rollout-0", range(begin, begin + 10))
            for pending in writer.pending():
                with writer.open(pending) as shard:
                    if pending.record.guid_max % 2:
                        writer.skip(pending)
                    else:
                        writer.put(pending, ref_logprobs(shard))
            writer.collect(begin + 8)
            assert writer.pending() == []
            assert sorted(writer._done.values()) == [begin + 8, begin + 9]
    with SidecarWriter(paths, "reference-0", {}) as writer:  # 29 was skipped
        assert [p.record.guid_min for p in writer.pending(28)] == [29]


def test_columns_that_do_not_fit_are_refused_before_anything_is_written(paths):
    produce_all(paths, P)
    with SidecarWriter(paths, "reference-0", {}) as writer:
        pending = writer.pending()[0]
        with writer.open(pending) as shard:
            good = ref_logprobs(shard)["ragged/ref_logprobs"]
        for columns, message in (
            ({"ragged/ref_logprobs": good[:-1]}, "has 13 values, shard .* has 14"),
            ({"ragged/ref_logprobs": good.astype(np.float64)}, "float64"),
            ({"ragged/values": good}, "reference writes"),
            ({}, "reference writes"),
            ({"ragged/ref_logprobs": good, "ragged/values": good}, "reference writes"),
        ):
            with pytest.raises(BusError, match=message):
                writer.put(pending, columns)
        assert list(paths.producer("reference-0").glob("f*/*")) == []
        other = pending._replace(record=pending.record._replace(uuid="ab" * 16))
        with pytest.raises(DamagedError, match="is not the shard"):
            writer.put(other, {"ragged/ref_logprobs": good})
        assert writer.pending()[0] == pending


def test_needs_and_names_are_checked_at_the_start(paths):
    with pytest.raises(BusError, match="need the columns of teacher, but no sidecar writer"):
        sequencer(paths, needs=["teacher"])
    with pytest.raises(BusError, match="has no sidecar writer rollout-0"):
        SidecarWriter(paths, "rollout-0", {})
    with pytest.raises(BusError, match="has no producer reference-0"):
        Producer(paths, "reference-0", {})


def test_groups_sampled_again_are_widened_again(paths):
    produce_all(paths, P)
    for name in ("reference-0", "reference-1"):
        widen(paths, name)
    paths.shard("rollout-0", 1, 0).unlink()
    with sequencer(paths, needs=["reference"]) as seq:
        with pytest.raises(PeerTimeoutError, match=r"rollout-0 owes \[0\]"):
            batch(seq, 1)
        with Producer(paths, "rollout-0", {}) as producer:
            producer.put([group(0, version=4)])
        with pytest.raises(PeerTimeoutError, match=r"reference-0 owes \[0\]"):
            batch(seq, 1)
        assert widen(paths, "reference-0") == 1
        record = batch(seq, 1)
    assert record.policy_version_min == 0
    assert Reader(paths).rows(record, [0])[0].policy_version_max == 4


def test_a_column_is_a_line_of_the_schema(paths, tmp_path, monkeypatch):
    """One of every token and one of every row, by a role that writes nothing else."""
    declared = {
        "ragged/surprise": Column("float32", "token", "judge", "how odd a judge finds a token"),
        "row/verdict": Column("float32", "row", "judge", "what it says of the whole"),
    }
    monkeypatch.setitem(COLUMN_WRITERS, "judge", 16)
    monkeypatch.setitem(log.ROLE_OF_NUMBER, 16, "judge")
    for name, column in declared.items():
        monkeypatch.setitem(COLUMNS, name, column)
        monkeypatch.setitem(DTYPES, name, column.dtype)
    paths = make_bus(tmp_path / "judged", writers={"judge-0": "judge"})
    produce_all(paths, P)
    with SidecarWriter(paths, "judge-0", {"job": 7}) as writer:
        for pending in writer.pending():
            with writer.open(pending) as shard:
                tokens, guids = shard.read("ragged/token_ids"), shard.read("row/guid")
            given = {"ragged/surprise": tokens / 2, "row/verdict": guids + 0.5}
            writer.put(pending, {k: v.astype(np.float32) for k, v in given.items()})
    with sequencer(paths, needs=("judge",)) as seq:
        record = batch(seq, 1)
    rows = Reader(paths).rows(record, [6, 1])
    assert [row.columns["verdict"] for row in rows] == [3.5, 0.5]
    for row in rows:
        assert np.array_equal(row.columns["surprise"], (row.token_ids / 2).astype(np.float32))
    (row,) = Reader(paths).rows(record, [6], columns=["row/verdict"])
    assert row.columns.keys() == {"rollout_logprobs", "verdict"}
