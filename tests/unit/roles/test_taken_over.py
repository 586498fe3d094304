"""A trainer whose place another has taken, or that comes after one, and what engines then load."""

import pytest
import torch

from relax_hpc.config.rollout import WeightsConfig
from relax_hpc.errors import FencedError
from relax_hpc.inference import members
from relax_hpc.inference.members import Member
from relax_hpc.runtime.comm.bucket import BucketPlan, Spec
from relax_hpc.runtime.comm.world import SoloWorld
from relax_hpc.runtime.files import storage
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.weights.pull_snapshot import Newest, SnapshotPublisher
from relax_hpc.weights.snapshot import SnapshotWriter
from relax_hpc.weights.transport import TrainerRanks

SPECS = [Spec("w", torch.float32, ())]


@pytest.fixture
def paths(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return RunPaths(tmp_path / "run")


def trainer(paths):
    world = SoloWorld()
    writer = SnapshotWriter(paths.weights, SPECS, world, paths.root.parent / "model")
    ranks, plan = TrainerRanks(world, writer, {}), BucketPlan.of(SPECS, 1 << 30)
    return SnapshotPublisher(WeightsConfig(), paths, plan, ranks)


def weights(value):
    return iter([("w", torch.tensor(float(value)))])


def held_up_at_its_end(monkeypatch, act):
    """The next snapshot is written whole, and then `act` happens before it is named."""
    real, acts = SnapshotWriter.finish, [act]

    def finish(self, name, records):
        snapshot = real(self, name, records)
        if acts:
            acts.pop()()
        return snapshot

    monkeypatch.setattr(SnapshotWriter, "finish", finish)


def test_a_trainer_that_wakes_after_another_took_over_leaves_the_record_alone(paths, monkeypatch):
    old, new, fences = trainer(paths), trainer(paths), [1]

    def check_fenced():
        if fences[-1] > 1:
            raise FencedError("plan fence 2 was claimed after 1")

    def overtaken():
        fences.append(2)
        assert new.publish(10, weights(10)).transport == "files"

    held_up_at_its_end(monkeypatch, overtaken)
    with pytest.raises(FencedError, match="fence 2"):
        old.publish(11, weights(-11), check_fenced=check_fenced)
    newest = Newest.read(paths)
    assert newest.version == 10 and newest.folder.is_dir()
    assert new.publish(11, weights(11)).transport == "files"
    assert Newest.read(paths).version == 11


def test_a_version_that_was_left_meanwhile_is_not_taken_back(paths, monkeypatch):
    """By the trainer before, which had got further, in its last moment."""
    before, publisher = trainer(paths), trainer(paths)
    held_up_at_its_end(monkeypatch, lambda: before.publish(11, weights(11)))
    publisher.publish(10, weights(10))
    newest = Newest.read(paths)
    assert newest.version == 11 and newest.folder.is_dir()
    assert publisher.publish(10, weights(10)).transport is None and not publisher.has_newcomers()
    storage.delete_folder(newest.folder)  # nobody can load it: engines have none
    publisher.publish(10, weights(10))
    assert Newest.read(paths).version == 10


@pytest.mark.parametrize(
    ("there", "comes", "wins"),
    [("7.1-1-1", "7.0-9-2", False), ("7.0-2-1", "7.0-1-3", False), ("7.0-10-1", "7.0-9-1", False),
     ("7.0-1-3", "7.0-1-1", True), ("7.0-1-1", "7.0-2-0", True), ("7.9-1-1", "7.10-1-1", True),
     ("9.0-1-1", "7.0-1-1", True), ("local-12.1-1-1", "local-11.0-1-1", True),
     ("local-12.1-1-1", "local-12.0-1-1", False)],
)  # fmt: skip
def test_an_owner_that_wakes_does_not_announce_its_engine_over_a_later_one(
    paths, there, comes, wins
):
    """Of two jobs nobody knows; within a task the engine's owner is one."""
    first = Member("rollout-0", there, "http://x", 1, "embedded", "HEALTHY")
    members.announce(paths, first)
    second = first._replace(start=comes, state="FAILED")
    members.announce(paths, second)
    assert members.find(paths, "rollout-0") == (second if wins else first)


def test_a_version_counts_as_left_only_while_the_record_names_it(paths):
    publisher, other = trainer(paths), trainer(paths)
    other.publish(1, weights(1))
    older = Newest.read(paths)
    publisher.publish(2, weights(2))
    older.write(paths)  # by a trainer that knows of no fence
    assert publisher.publish(2, weights(2)).transport == "files"
    assert Newest.read(paths).version == 2
    assert publisher.publish(2, weights(2)).transport is None
