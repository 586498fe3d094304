"""A reader written from docs/reference/bus.md with nothing of ours sees every trajectory."""

import json
import struct

import h5py
import numpy as np
from bus_fixtures import PRODUCERS, group, make_bus, produce
from test_shard import image, rich

from relax_hpc.bus.producer import Producer


# --- the stranger's program: h5py, numpy and the standard library
def committed(bus):
    """Shards in order of commitment: RUN.json names the logs, the logs name the files."""
    for name in json.loads((bus / "RUN.json").read_text())["producers"]:
        log, fence = (bus / "p" / name / "log").read_bytes(), 0
        for at in range(0, len(log) - 127, 128):
            magic, kind, _, record_fence, seq = struct.unpack_from("<4sHHIQ", log, at)
            assert magic == b"RLC1"
            if kind == 3:
                fence = max(fence, record_fence)
            elif kind == 1 and record_fence == fence:
                yield bus / "p" / name / f"f{fence}" / f"{seq:012d}.h5"


def trajectories(path):
    with h5py.File(path, "r") as file:
        column = {f"{g}/{n}": d[:] for g, folder in file.items() for n, d in folder.items()}
    cut = lambda name, i: slice(*column[name][i : i + 2])  # noqa: E731
    for i in range(len(column["index/offsets"]) - 1):
        row = {name[4:]: values[i] for name, values in column.items() if name.startswith("row/")}
        for name in ("token_ids", "loss_mask", "rollout_logprobs"):
            row[name] = column[f"ragged/{name}"][cut("index/offsets", i)]
        row["runs"] = column["ragged/version_runs"][cut("index/offsets__runs", i)]
        if "ragged/media_ref" in column:
            refs = column["ragged/media_ref"][cut("index/offsets__media_ref", i)]
            at = "index/offsets__media_bytes"
            row["media"] = [column["ragged/media_bytes"][cut(at, m)].tobytes() for m in refs]
            row["shown"] = [column["media/canonical_xxh3"][m].tobytes() for m in refs]
            row["spans"] = column["ragged/media_spans"][cut("index/offsets__media_spans", i)]
        if "ragged/routed_experts" in column:
            experts = column["ragged/routed_experts"][cut("index/offsets__routed", i)]
            first = experts if row["sibling"] == row["segment"] == 0 else first  # noqa: F821
            row["experts"] = np.r_[first[: len(row["token_ids"]) - len(experts)], experts]
        yield row


# --- end of the stranger's program


def assert_is(row, t):
    assert (row["guid"], row["sibling"], row["seed"]) == (t.guid, t.sibling, t.seed)
    assert (row["rewards"], row["finish"], row["prompt_len"]) == (t.reward, t.finish, t.prompt_len)
    given = {"token_ids": t.token_ids, "loss_mask": t.loss_mask, **t.columns}
    assert given.keys() == {"token_ids", "loss_mask", "rollout_logprobs"}
    for name, values in given.items():
        assert row[name].dtype == values.dtype
        assert row[name].tobytes() == values.tobytes()
    assert row["runs"].tolist() == t.version_runs.tolist()
    assert row.get("media", []) == [medium.data.tobytes() for medium in t.media]
    assert row.get("shown", []) == [medium.canonical_xxh3 for medium in t.media]
    assert np.array_equal(row.get("spans", np.empty((0, 3))), t.media_spans)
    if t.routed_experts is not None:
        assert row["experts"].tobytes() == t.routed_experts.tobytes()


def test_a_reader_in_plain_h5py_gets_what_was_put(tmp_path):
    paths = make_bus(tmp_path)
    put = {guid: group(guid) for guid in range(6)}
    produce(paths, PRODUCERS[0], [0, 2, 4], per_shard=2)
    produce(paths, PRODUCERS[1], [1, 3])
    produce(paths, PRODUCERS[1], [5])  # in its second fence
    put[6] = rich(6, [3, 0, 5], prompt=4, shown=[image(1), image(2)], own_prompt={2})
    put[8] = rich(8, [2, 2], prompt=2, shown=[image(2)])
    with Producer(paths, PRODUCERS[0], {}, compress={"ragged/routed_experts"}) as producer:
        producer.put([put[6], put[8]])
    found: dict[int, list] = {}
    for path in committed(tmp_path / "bus"):
        for row in trajectories(path):
            found.setdefault(int(row["guid"]), []).append(row)
    assert set(found) == set(put)
    for guid, prompt_group in put.items():
        for row, t in zip(found[guid], prompt_group.trajectories, strict=True):
            assert_is(row, t)
