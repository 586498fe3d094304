"""Every kind of record outlives one error of storage at any system call: no process ends."""

import errno
import os

import pytest
import torch
from failing_calls import DONE, UNDONE, failing
from fake_part import NAMES
from test_checkpoints import Trainer, checkpoints_in

from relax_hpc.bus import layout
from relax_hpc.bus.plan import PlanPosition
from relax_hpc.config.rollout import WeightsConfig
from relax_hpc.inference import members
from relax_hpc.inference.members import Member, Roster, RosterEntry
from relax_hpc.inference.process import spawn
from relax_hpc.launch import requeue
from relax_hpc.roles.ending import Ending
from relax_hpc.roles.engine.host import Parts
from relax_hpc.roles.rollout.folders import digests_of
from relax_hpc.roles.rollout.heldout import Due, HeldoutRow, ScoreBoard, TaskScore
from relax_hpc.runtime.comm.bucket import BucketPlan, Spec
from relax_hpc.runtime.comm.world import SoloWorld
from relax_hpc.runtime.files import storage
from relax_hpc.runtime.files.records import read_json, write_json
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.trainer.models import hf_folder
from relax_hpc.weights.pull_snapshot import SnapshotPublisher
from relax_hpc.weights.snapshot import SnapshotWriter
from relax_hpc.weights.transport import TrainerRanks

JOB, ATTEMPT = "7", "7.0"
TENSORS = {"a": torch.ones(3), "b": torch.zeros(2)}


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    monkeypatch.setattr(storage, "_FIRST_S", 0.0001)
    monkeypatch.setattr(storage, "_LONGEST_S", 0.001)
    monkeypatch.setattr(requeue, "tell", lambda *_: None)
    monkeypatch.setattr(requeue, "output_of", lambda *_: None)
    monkeypatch.setattr(os, "fsync", lambda _: None)  # a disk takes its time
    storage.settle(60.0)


class PatientTrainer(Trainer):
    """Its parts outlive errors, as those of `engines.megatron.checkpoint` do."""

    def checkpoint_part(self, *, copy):
        part = super().checkpoint_part(copy=copy)
        write, write_names = part.write, part.write_names
        part.write = lambda folder: storage.patiently(folder, lambda: write(folder))
        part.write_names = lambda folder, **kwargs: storage.patiently(
            folder, lambda: write_names(folder, **kwargs)
        )
        return part

    def damage(self, folder):
        return None if storage.exists(folder / NAMES) else f"{folder / NAMES}: is not there"

    def load(self, folder):
        storage.patiently(folder, lambda: super(PatientTrainer, self).load(folder))


def of_members(paths):
    seen = members.follow(paths)
    for state in ("STARTING", "HEALTHY"):
        members.announce(paths, Member("rollout-0", "1", "", 1, "embedded", state))
    members.announce_extras(paths, ["extra-1"])
    return seen.get("rollout-0")[0].state, members.extras(paths), members.find(paths, "extra-1")


def of_weights(paths):
    Roster(3, {"rollout-0": RosterEntry("1", 3, "ACTIVE")}).write(paths)
    members.give(paths, ATTEMPT, "engines")
    return Roster.read(paths).serves("rollout-0", "1"), members.is_with_engines(paths, ATTEMPT)


def of_ends(paths):
    """A task hears of the end, saves and keeps; Slurm refuses, and it comes again."""
    told = []
    ending, keeps = Ending(paths, ATTEMPT), Ending(paths, ATTEMPT, paths.keeps(ATTEMPT, 0))
    ending.will_save()
    keeps.will_save()
    told += [requeue.announce(JOB, paths.root), requeue.announce(JOB, paths.root)]
    told += [ending.is_near(), requeue.is_unsaved(paths.all_keeps(ATTEMPT))]
    keeps.note_saved(2)
    ending.note_saved(4)
    told.append(requeue.is_unsaved([*paths.all_keeps(ATTEMPT), paths.saves(ATTEMPT)]))
    write_json(paths.ending(ATTEMPT), {"refused": "no"})
    told.append(requeue.announce(JOB, paths.root))
    write_json(paths.cancellation(JOB), {})
    return [*told, requeue.ask(JOB, paths.root)]


def of_heldout(paths):
    board, due = ScoreBoard(paths, 0, 1), Due("heldout", "after", 0)
    row = HeldoutRow(0, 0, 1.0, {}, 3, 3, "stop", 5, ["2"])
    board.begin(due)
    board.keep(due, [row])
    kept, again = board.count_kept_bytes([due]), board.begin(due)
    board.add(due, TaskScore.of([row]), [row])
    return kept, again == [row], board.list_begun("heldout"), board.count_kept_bytes([due])


def of_engines(paths):
    """Of several nodes, and the log of a start."""
    parts = Parts(paths, "rollout-0", 2)
    with parts.call("1"):
        write_json(paths.engine_part("rollout-0", 1), {"start": "1", "node": "n", "reason": "died"})
        why = parts.end("1")
    parts.dismiss("1")
    with spawn(["true"], paths.engine_log("rollout-0", "1"), {}) as engine:
        engine._process.wait(30)
        return why, read_json(paths.engine_call("rollout-0"))["over"], engine.output()


def of_checkpoints(paths):
    """Saved, one of them torn, passed over and set aside, and rotated; two are kept for good."""
    root, seen = paths.checkpoints, []
    for step in (2, 3, 4, 5):
        saves = checkpoints_in(root, keep=2, keep_every=2)
        seen += saves.save(PatientTrainer(step, step), PlanPosition(1, step, step))
    storage.delete(root / "step_00000005" / NAMES)
    resumed = checkpoints_in(root).resume(trainer := PatientTrainer(0))
    there = {each: storage.names(root / each) for each in (".", "kept", "torn")}
    left = {each: [name[:13] for name in found] for each, found in there.items()}
    return [save.failure for save in seen], resumed.step, trainer.weight, left


def of_models(paths):
    for _ in range(2):  # the second one replaces the first
        hf_folder.write(paths.hf(2), iter(TENSORS.items()), paths.root / "model", shard_bytes=12)
    return storage.names(paths.hf(2)), digests_of(paths.hf(2))


def of_snapshots(paths):
    """Three, so that one goes; a trainer that was restarted is behind, and leaves none."""
    specs = [Spec(name, each.dtype, tuple(each.shape)) for name, each in TENSORS.items()]
    writer = SnapshotWriter(paths.weights, specs, SoloWorld(), paths.root / "model")
    ranks, plan = TrainerRanks(SoloWorld(), writer, {}), BucketPlan.of(specs, 1 << 20)
    said = []
    for version in (1, 2, 3, 1):
        publisher = SnapshotPublisher(WeightsConfig(), paths, plan, ranks)
        done = publisher.publish(version, iter(TENSORS.items()))
        said.append((done.transport, done.error))
    return said, [name[:7] for name in storage.names(paths.weights)]


KINDS = (
    *(of_members, of_weights, of_ends, of_heldout, of_engines),
    *(of_checkpoints, of_models, of_snapshots),
)
FAULTS = (errno.ESTALE, UNDONE), (errno.EIO, DONE)


def of_ends_without_links(paths):  # O3
    def link(*_):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "link", link)
        return of_ends(paths)


@pytest.mark.parametrize("use", [*KINDS, of_ends_without_links], ids=lambda use: use.__name__)
def test_one_error_at_any_call_on_any_kind_of_record_changes_nothing(tmp_path, monkeypatch, use):
    def begun(name):
        paths = RunPaths(tmp_path / name)
        (paths.root / "model").mkdir(parents=True)
        paths.submission.mkdir()
        (paths.root / "model" / "config.json").write_text("{}")
        for each in (paths.root, paths.submission):
            each.chmod(0o700)
        paths.secret.write_text("ab" * 32)
        paths.secret.chmod(0o600)
        layout.create(paths.bus, ["rollout-0"], {})
        return paths

    undisturbed = use(begun("undisturbed"))
    for nth in range(1, 10_000):
        paths, fault = begun(str(nth)), FAULTS[nth % 2]
        with failing(monkeypatch, paths.root, nth, *fault, in_any_thread=True) as faults:
            found = use(paths)
        if faults.call is None:
            break
        assert found == undisturbed, (nth, faults.call, fault)
    assert nth > 4, "too few places"
