"""Everything that has to outlive a power cut: what is written, flushed and named, in this order."""

import json

import pytest
import torch
from bus_fixtures import group, make_bus, produce
from disk_calls import recorded

from relax_hpc.bus import layout
from relax_hpc.bus.frames import FrameWriter, encode
from relax_hpc.bus.log import LogWriter
from relax_hpc.bus.plan import NOTHING, PlanPosition, claim_fence, write_snapshot
from relax_hpc.bus.producer import Producer
from relax_hpc.bus.tools import garbage
from relax_hpc.runtime.comm.world import SoloWorld
from relax_hpc.runtime.files.records import write_json, write_json_once
from relax_hpc.runtime.paths import BusPaths
from relax_hpc.trainer.checkpoints.store import Checkpoints
from relax_hpc.trainer.models import hf_folder

RECORD = ["write draft", "flush draft", "rename draft -> record.json"]


def test_a_record_is_on_disk_before_it_has_its_name(tmp_path):
    with recorded() as calls:
        write_json(tmp_path / "record.json", {"step": 1})
    assert calls == RECORD
    with recorded() as calls:
        assert write_json_once(tmp_path / "once.json", {"step": 1})
    assert calls == ["write draft", "flush draft", "link draft -> once.json", "delete draft"]


def test_a_bus_is_complete_on_disk_before_its_header_says_that_it_is_one(tmp_path):
    paths = BusPaths(tmp_path / "bus")
    with recorded() as calls:
        layout.create(paths, ["rollout-0"], {})
    assert calls[calls.index("create credits") :] == [
        "create credits", "flush ctl/",
        "create log", "flush rollout-0/",
        "write draft", "flush draft", "rename draft -> RUN.json", "flush bus/",
    ]  # fmt: skip


def test_a_shard_is_on_disk_under_its_name_before_the_log_says_so(tmp_path):
    paths = make_bus(tmp_path)
    with recorded() as calls:
        producer = Producer(paths, "rollout-0", {})
    assert calls == [
        "open log, O_DSYNC", "write log", "flush log",
        "flush rollout-0/",  # the ballast
        "make f1/", "flush rollout-0/",
    ]  # fmt: skip
    with producer, recorded() as calls:
        producer.put([group(0)])
    assert calls == [
        "write draft", "rename draft -> 000000000000.h5", "flush 000000000000.h5", "flush f1/",
        "write log", "flush log",
    ]  # fmt: skip


def test_the_torn_tail_of_a_log_is_disowned_before_anything_is_behind_it(tmp_path):
    paths = make_bus(tmp_path)
    produce(paths, "rollout-0", [0])
    log = paths.log("rollout-0")
    log.write_bytes(log.read_bytes() + b"half a record")
    with recorded() as calls:
        LogWriter(log).close()
    assert calls == ["open log, O_DSYNC", "write log", "flush log"]


def test_a_claim_of_the_plan_is_on_disk_before_it_is_believed(tmp_path):
    paths = make_bus(tmp_path)
    with recorded() as calls:
        assert claim_fence(paths) == 1
    assert calls == [f"create {paths.plan_claim(1).name}", "flush plan/"]


def test_a_record_of_the_plan_is_on_disk_when_it_is_appended(tmp_path):
    with recorded() as calls:
        writer = FrameWriter(tmp_path / "f1.log")
    assert calls == ["create f1.log, O_DSYNC", f"flush {tmp_path.name}/"]
    with recorded() as calls:
        writer.append({"step": 1})
        writer.append({"step": 2})
    assert calls == ["write f1.log", "flush f1.log"] * 2
    writer.close()
    with (tmp_path / "f1.log").open("ab") as file:
        file.write(encode({"step": 3})[:-1])
    with recorded() as calls:
        FrameWriter(tmp_path / "f1.log").close()
    assert calls == ["open f1.log, O_DSYNC", "write f1.log", "flush f1.log"]  # what is torn is cut


def test_older_sums_of_the_plan_go_when_the_newest_is_on_disk(tmp_path):
    paths = make_bus(tmp_path)
    for records in (1, 2):
        write_snapshot(paths, NOTHING._replace(fence=1, records=records))
    names = [paths.plan_snapshot(1, records).name for records in (1, 3)]
    with recorded() as calls:
        write_snapshot(paths, NOTHING._replace(fence=1, records=3))
    assert calls == [
        "write draft",
        "flush draft",
        f"rename draft -> {names[1]}",
        f"delete {names[0]}",
    ]


def test_what_is_collected_is_off_the_disk_when_it_is_counted(tmp_path):
    paths = make_bus(tmp_path)
    produce(paths, "rollout-0", [0])
    orphan = paths.shard("rollout-0", 1, 9)
    orphan.write_bytes(b"")
    with recorded() as calls:
        garbage.delete(garbage.find(paths, []))
    assert calls == ["delete 000000000009.h5", "flush f1/"]


class Trainer:
    """Its checkpoint has nothing but what the roles put in."""

    step = 3

    def checkpoint_part(self, *, copy):
        return self

    def write(self, folder):
        pass

    def write_names(self, folder, *, timeout_s, cancelled):
        return 0


def test_a_checkpoint_is_on_disk_before_it_has_its_name_and_older_ones_go(tmp_path):
    root = tmp_path / "checkpoints"
    checkpoints = Checkpoints(root, SoloWorld(), PlanPosition, keep=1)
    with recorded() as calls:
        checkpoints.save(Trainer(), PlanPosition(1, 3, 3))
    assert calls[calls.index("flush draft") :] == [
        "flush draft", "rename draft -> progress.json",
        "flush draft/", "rename draft -> step_00000003", "flush checkpoints/",
    ]  # fmt: skip
    trainer = Trainer()
    trainer.step = 4
    with recorded() as calls:
        checkpoints.save(trainer, PlanPosition(1, 4, 4))
    removed = next(n for n, line in enumerate(calls) if line.startswith("rename step_00000003"))
    assert calls[removed - 2 : removed] == ["rename draft -> step_00000004", "flush checkpoints/"]


@pytest.mark.parametrize("durable", [True, False])
def test_exported_weights_are_on_disk_before_they_have_their_name(tmp_path, durable):
    source, folder = tmp_path / "source", tmp_path / "exported"
    source.mkdir()
    (source / "config.json").write_text(json.dumps({"dtype": "bfloat16"}))
    with recorded() as calls:
        hf_folder.write(folder, [("w", torch.zeros(2))], source, durable=durable)
    end = calls.index("rename draft -> exported")
    flushed = [line for line in calls[:end] if line.startswith("flush")]
    if durable:
        assert sorted(flushed[-3:-1]) == ["flush config.json", "flush model.safetensors"]
        assert flushed[-1] == "flush draft/"
        assert calls[end + 1] == f"flush {tmp_path.name}/"
    else:
        assert flushed == ["flush draft"]  # config.json, as every record
