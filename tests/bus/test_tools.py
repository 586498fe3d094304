import json
import os
import random
import shutil
import subprocess
import threading

import bus_fixtures as made
import pytest
from bus_steps import SHARD, bus_with_steps, flip, plan, widen, widened_bus
from typer.testing import CliRunner

from relax_hpc.bus.frames import FrameWriter
from relax_hpc.bus.log import read_log
from relax_hpc.bus.plan import PlanPosition, PlanRecord, PlanSnapshot, ShardRange, Sidecar
from relax_hpc.bus.producer import Producer
from relax_hpc.bus.tools import garbage, show, verify
from relax_hpc.cli.main import app
from relax_hpc.errors import BusError, LaunchError
from relax_hpc.runtime.files.records import write_json
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.process import ProcessId


def check(paths, checkpoints=()):
    return verify.verify(paths, lambda: list(checkpoints), lambda done, total: None)


def invoke(*args):
    return CliRunner().invoke(app, ["bus", *map(str, args)])


def wrong(found):
    return [(finding.kind, finding.what) for finding in found.findings if finding.harmful]


# ---------------------------------------------------------------- ls


def test_ls_counts_what_is_live_retired_and_missing(tmp_path):
    paths = bus_with_steps(tmp_path, release=1)
    paths.shard("rollout-1", 1, 3).unlink()
    found = show.list_writers(paths, PlanPosition(1, 3, 3))
    zero, one = found.writers
    assert (zero.live_shards, zero.retired_shards, zero.missing_shards) == (3, 1, 0)
    assert (one.live_shards, one.retired_shards, one.missing_shards) == (2, 1, 1)
    # 8 prompt groups of 2 siblings of 7 tokens each
    assert (one.trajectories, one.tokens, one.guid_min, one.guid_max) == (16, 112, 1, 15)
    assert (one.state, one.fence, one.policy_version_min) == ("closed", 2, 0)
    on_disk = sum(file.stat().st_size for file in paths.producer("rollout-1").glob("f*/*"))
    assert one.bytes_on_disk == on_disk > 0
    assert (found.total.trajectories, found.total.live_shards) == (32, 5)
    assert (found.plan.steps, found.plan.trajectories) == (3, 24)
    assert found.plan.fences == [(1, 0)]
    assert found.plan.credit.retired_guid_below == made.P


def test_ls_counts_trajectories_once_however_many_roles_widen_them(tmp_path):
    paths = made.make_bus(tmp_path, writers={"reference-0": "reference"})
    made.produce(paths, "rollout-0", [0, 2])
    widen(paths, 0)
    found = show.list_writers(paths, None)
    side = found.writers[2]
    assert (side.name, side.role, side.live_shards, side.trajectories) == (
        "reference-0", "reference", 2, 4,
    )  # fmt: skip
    assert (found.total.trajectories, found.total.live_shards) == (4, 4)
    assert found.writers[1].state == "unused"


# ---------------------------------------------------------------- verify


def test_a_healthy_bus_is_sound_through_restarts_sidecars_portions_and_retirement(tmp_path):
    paths = widened_bus(tmp_path)
    options = {"needs": ["reference"]}
    with made.sequencer(paths, **options) as first:
        made.batch(first, 1)
        position = first.position
        while not first.next_portion(2, min_tokens=20, timeout_s=1).last:
            pass
    with made.sequencer(paths, position, **options) as second:
        made.batch(second, 2)
        made.batch(second, 3)
        second.release(1)
    for name in made.PRODUCERS:
        with Producer(paths, name, {}) as producer:
            assert producer.collect(made.P) == 1
    found = check(paths, [position])
    assert found.findings == []
    assert (found.shards, found.retired, found.steps) == (10, 2, 3)
    assert found.nbytes == sum(file.stat().st_size for file in paths.root.glob("p/*/f*/*.h5"))


def overwrite(paths, *, source):
    paths.shard(*SHARD).write_bytes(paths.shard(*source).read_bytes())


NOISE = random.Random(0).randbytes(700)


def snapshot_of(paths, below=made.P):
    """A file to be spoilt; of a bus whose first step is behind a checkpoint."""
    path = paths.plan_snapshot(1, 1)
    values = PlanSnapshot(1, 1, 0, 1, below, [], [], [], 0, {})._asdict()
    path.write_text(json.dumps(values))
    return path.open("r+")


DAMAGE = {
    "missing": (lambda p: p.shard(*SHARD).unlink(), "missing", "it is gone"),
    "torn": (lambda p: p.shard(*SHARD).open("r+b").truncate(5000), "shard", "is torn"),
    "another shard": (
        lambda p: overwrite(p, source=("rollout-0", 1, 2)), "foreign", "is not the shard that was",
    ),
    "stray file": (
        lambda p: (p.fence("rollout-0", 1) / "notes.txt").touch(), "foreign", "is no file of a bus",
    ),
    "log": (lambda p: flip(p.log("rollout-0"), 128 * 2 + 30), "log", "record 2 is damaged"),
    "plan log": (lambda p: flip(p.plan_log(1), 40), "plan", "a record is damaged"),
    "last step planned": (lambda p: flip(p.plan_log(1), -9), "plan", "are no record"),
    "credits": (lambda p: p.credits.write_bytes(NOISE), "credits", "are no record"),
    "empty credits": (lambda p: p.credits.write_bytes(b""), "credits", "plan fence 1 has planned"),
    "no credits": (lambda p: p.credits.unlink(), "credits", "cannot be read"),
    "no plan": (lambda p: shutil.rmtree(p.plan), "missing", "restore the folder"),
    "snapshot of another plan": (
        lambda p: snapshot_of(p, below=5), "plan", "guids below 5 are planned, and it is not",
    ),
    "foreign snapshot": (lambda p: snapshot_of(p).write("{}"), "plan", "cannot be read"),
}  # fmt: skip


@pytest.mark.parametrize(("damage", "kind", "what"), DAMAGE.values(), ids=DAMAGE)
def test_verify_names_what_is_damaged_missing_or_foreign(tmp_path, damage, kind, what):
    paths = bus_with_steps(tmp_path)
    assert check(paths).is_sound
    damage(paths)
    found = check(paths)
    assert not found.is_sound
    [(found_kind, found_what)] = wrong(found)
    assert found_kind == kind
    assert what in found_what
    assert found.shards >= 4  # one damaged log or file does not hide the others


def test_verify_finds_steps_that_were_trained_and_are_not_planned(tmp_path):
    paths = made.make_bus(tmp_path)
    made.produce_all(paths, 16, per_shard=2)
    with made.sequencer(paths) as sequencer:
        sizes = []
        for step in (1, 2):
            made.batch(sequencer, step)
            sequencer.advance(step=step, policy_version=step)
            sizes.append(paths.plan_log(1).stat().st_size)
    assert check(paths).is_sound
    os.truncate(paths.plan_log(1), sizes[0])  # as if the file system had lost its last record
    assert wrong(check(paths)) == [
        ("plan", "is planned up to step 1, but step 2 was trained; restore the file")
    ]


@pytest.mark.parametrize("content", ["[1]", "{}", '{"format": "x"}', '{"format": 5}', "{"])
def test_a_header_that_is_none_is_said_in_a_line(tmp_path, content):
    paths = made.make_bus(tmp_path)
    paths.header.write_text(content)
    with pytest.raises(BusError, match=r"RUN\.json: cannot be read: .*; restore the file"):
        check(paths)


def test_verify_finds_damage_that_only_other_hdf5_tools_would_meet(tmp_path):
    paths = bus_with_steps(tmp_path)
    path = paths.shard(*SHARD)
    healthy = path.read_bytes()
    superblock = healthy.index(b"\x89HDF\r\n\x1a\n")
    header = healthy.index(b"OHDR", superblock)
    for at in (superblock + 20, header + 20, healthy.index(b"shard_uuid", header) + 2):
        flip(path, at)
        [(kind, what)] = wrong(check(paths))
        assert kind == "shard"
        assert "HDF5 finds it damaged" in what
        path.write_bytes(healthy)
    assert check(paths).is_sound


def test_what_a_crash_leaves_is_listed_and_not_wrong(tmp_path):
    paths = bus_with_steps(tmp_path)
    orphan = paths.shard("rollout-0", 1, 99)
    orphan.write_bytes(paths.shard(*SHARD).read_bytes())
    draft = orphan.with_name(".000000000100.h5.4711.tmp")
    draft.touch()
    with paths.log("rollout-1").open("ab") as log:
        log.write(b"RLC1 and no more")
    found = check(paths)
    assert found.is_sound
    assert {(f.kind, f.where) for f in found.findings} == {
        ("orphan", str(orphan)), ("orphan", str(draft)),
    }  # fmt: skip


def part_of(paths, name, seq, lo, hi):
    record = next(r for r in read_log(paths.log(name)) if r.seq == seq and r.rows)
    return ShardRange(name, record.fence, record.seq, record.uuid, lo, hi)


def step_four(paths, **changes):
    """Makes step 4 as it should be: the guids 12 to 15."""
    parts = [part_of(paths, made.PRODUCERS[g % 2], 3, g // 2 % 2 * 2, g // 2 % 2 * 2 + 2)
             for g in range(12, 16)]  # fmt: skip
    record = PlanRecord(4, list(range(12, 16)), parts, 8, 0, 56, sidecars={})
    return record._replace(**changes)


BAD_PLANS = {
    "half a portion": (lambda p: step_four(p, portion=1), "stands where step 4, portion 0 is due"),
    "count": (lambda p: step_four(p, num_trajectories=9), "says 9 trajectories"),
    "twice": (
        lambda p: step_four(p, guids=[11, 12, 13, 14],
                            parts=[part_of(p, "rollout-1", 2, 2, 4), *step_four(p).parts[:3]]),
        "prompt group 11 is in step 3 too",
    ),
    "uncommitted": (
        lambda p: step_four(p, parts=[step_four(p).parts[0]._replace(uuid="ab" * 16),
                                      *step_four(p).parts[1:]]),
        f"{'ab' * 16} is not committed",
    ),
    "elsewhere": (
        lambda p: step_four(p, parts=[step_four(p).parts[0]._replace(producer="rollout-1"),
                                      *step_four(p).parts[1:]]),
        "is shard 3 of rollout-0, not shard 3 of rollout-1",
    ),
    "beyond the shard": (
        lambda p: step_four(p, num_trajectories=10,
                            parts=[step_four(p).parts[0]._replace(hi=6), *step_four(p).parts[1:]]),
        "rows 0..5 of a shard of 4 rows",
    ),
    "other rows": (
        lambda p: step_four(p, parts=[step_four(p).parts[0]._replace(lo=2, hi=4),
                                      *step_four(p).parts[1:]]),
        "rows 2..3 are planned as prompt group 12, and hold [14]",
    ),
    "no such sidecar": (
        lambda p: step_four(p, sidecars={
            step_four(p).parts[0].uuid: {"reference": Sidecar("r", 1, 0, "cd" * 16)}}),
        f"sidecar {'cd' * 16} (reference) is not committed",
    ),
}  # fmt: skip


def check_planned(paths, record):
    log = FrameWriter(paths.plan_log(1))
    log.append(record._asdict())
    log.close()
    return check(paths)


@pytest.mark.parametrize(("record", "what"), BAD_PLANS.values(), ids=BAD_PLANS)
def test_verify_finds_a_plan_that_does_not_fit_the_logs(tmp_path, record, what):
    paths = bus_with_steps(tmp_path)
    found = check_planned(paths, record(paths))
    assert any(kind == "plan" and what in text for kind, text in wrong(found)), found.findings


def test_the_hand_made_step_of_these_tests_is_right(tmp_path):
    paths = bus_with_steps(tmp_path)
    assert check_planned(paths, step_four(paths)).findings == []


def test_a_shard_deleted_with_leave_is_not_missing_but_a_checkpoint_that_reads_it_is_told(tmp_path):
    paths = bus_with_steps(tmp_path, release=2)
    assert check(paths, [PlanPosition(1, 2, 2), PlanPosition(1, 3, 3)]).findings == []
    [(kind, what)] = wrong(check(paths, [PlanPosition(1, 1, 1)]))[:1]
    assert kind == "checkpoint"
    assert "step 2 reads" in what


def test_a_checkpoint_of_a_fenced_trainer_is_told(tmp_path):
    paths = bus_with_steps(tmp_path, steps=2)
    plan(paths, 3, position=PlanPosition(1, 1, 1))
    assert check(paths, [PlanPosition(1, 2, 2)]).is_sound
    [(kind, what)] = wrong(check(paths, [PlanPosition(1, 3, 3)]))
    assert kind == "checkpoint"
    assert "not in this run's plan" in what


def test_verify_finds_nothing_wrong_while_a_run_commits_plans_and_deletes(tmp_path):
    paths, stop, failures, looks, saved = made.make_bus(tmp_path), threading.Event(), [], [], []

    def look():
        while not stop.is_set():
            found = verify.verify(paths, lambda: saved[-2:], lambda done, total: None)
            failures.extend(found.findings if found.is_sound else wrong(found))
            looks.append(found)

    looker = threading.Thread(target=look)
    looker.start()
    try:
        producers = [Producer(paths, name, {}) for name in made.PRODUCERS]
        with made.sequencer(paths, prompts_per_step=2) as sequencer:
            for step in range(1, 60):
                for r, producer in enumerate(producers):
                    producer.put([made.group(2 * (step - 1) + r)])
                made.batch(sequencer, step)
                saved.append(sequencer.position)  # a checkpoint every step; two are kept
                sequencer.release(saved[-2:][0].step)
                for producer in producers:
                    producer.collect(2 * saved[-2:][0].step)
    finally:
        stop.set()
        looker.join()
    assert [f for f in failures if getattr(f, "kind", "") != "orphan"] == []
    assert len(looks) > 3
    assert looks[-1].retired > 0


# ---------------------------------------------------------------- gc


def resume_and_read(paths, position, steps):
    """Every trajectory that the steps after `position` train on."""
    _, records = plan(paths, steps, position=position)
    return made.rows_of(paths, *records)


def test_gc_deletes_orphans_and_what_was_released_and_no_checkpoint_needs(tmp_path):
    paths = bus_with_steps(tmp_path, steps=3)
    positions, _ = plan(paths, 3, release=2)
    orphan = paths.shard("rollout-0", 1, 99)
    orphan.touch()
    stranger = paths.fence("rollout-0", 1) / "notes.txt"
    stranger.touch()
    kept = [positions[2], positions[3]]
    found = garbage.find(paths, kept)
    assert [file.path for file in found.orphans] == [orphan]
    assert {file.path for file in found.retired} == {
        paths.shard(name, 1, seq) for name in made.PRODUCERS for seq in (0, 1)
    }
    before = sum(file.stat().st_size for file in paths.root.rglob("*.h5"))
    garbage.delete(found)
    assert sum(file.stat().st_size for file in paths.root.rglob("*.h5")) == before - found.nbytes
    assert wrong(check(paths, kept)) == [("foreign", "is no file of a bus; move it elsewhere")]
    stranger.unlink()
    assert garbage.find(paths, kept) == garbage.Garbage([], [])
    for position in kept:
        rows = resume_and_read(paths, position, 4)
        expected = [
            made.trajectory(g, s) for g in range(made.P * position.step, 16) for s in (0, 1)
        ]
        assert all(map(made.same, rows, expected)), position
        assert len(rows) == len(expected)


@pytest.mark.parametrize("step", [0, 1, 2, 3])
def test_gc_never_deletes_what_the_oldest_checkpoint_needs_even_if_it_was_released(tmp_path, step):
    paths = bus_with_steps(tmp_path, steps=0)
    positions, _ = plan(paths, 3, release=3)  # the trainer released all three steps
    kept = [positions[step]] if step else []  # but its newer checkpoints are lost
    found = garbage.find(paths, kept)
    newer = [position for number, position in positions.items() if number > step > 0]
    assert garbage.find(paths, newer + kept) == found  # or are not
    garbage.delete(found)
    left = {path for path in paths.root.rglob("*.h5")}
    assert left == {paths.shard(name, 1, seq) for name in made.PRODUCERS for seq in range(step, 4)}


def test_gc_keeps_what_was_not_released_and_what_is_not_planned(tmp_path):
    paths = bus_with_steps(tmp_path, steps=0)
    positions, _ = plan(paths, 3)
    assert garbage.find(paths, [positions[3]]) == garbage.Garbage([], [])
    # A grant that goes beyond the plan, as no trainer writes it.
    credits = FrameWriter(paths.credits)
    credits.append({"plan_fence": 9, "step": 3, "policy_version": 3,
                    "retired_guid_below": 1000, "finished": False})  # fmt: skip
    credits.close()
    found = garbage.find(paths, [positions[3]])
    assert {int(file.path.stem) for file in found.retired} == {0, 1, 2}


def test_a_sidecar_goes_with_the_shard_it_widens(tmp_path):
    paths = widened_bus(tmp_path)
    positions, _ = plan(paths, 3, release=3)
    found = garbage.find(paths, [positions[2]])
    gone = {file.path for file in found.retired}
    assert {path.parent.parent.name for path in gone} == {*made.PRODUCERS, "reference-0"}
    garbage.delete(found)
    assert check(paths, [positions[2]]).findings == []
    assert len(list(paths.producer("reference-0").rglob("*.h5"))) == 2


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda p: flip(p.log("rollout-0"), 128 * 2 + 30), "record 2 is damaged"),
        (lambda p: p.log("rollout-0").write_bytes(NOISE), "are no record"),
        (lambda p: p.credits.write_bytes(NOISE), "are no record"),
    ],
    ids=["record", "log", "credits"],
)
def test_gc_deletes_nothing_from_a_bus_whose_records_are_damaged(tmp_path, damage, what):
    paths = bus_with_steps(tmp_path, steps=0)
    positions, _ = plan(paths, 3, release=3)
    damage(paths)
    with pytest.raises(BusError, match=what):
        garbage.find(paths, [positions[3]])


def make_run(tmp_path, controller):
    """A run directory with a bus, one checkpoint, and a launch record of `controller`."""
    run = RunPaths(tmp_path / "run")
    run.root.mkdir()
    write_json(run.config, {})
    bus_with_steps(run.root, steps=0)
    positions, _ = plan(run.bus, 3, release=3)
    progress = {"step": 3, "position": list(positions[3])}
    write_json(run.checkpoints / "step_00000003" / "progress.json", progress)
    folder = run.submission / "rollout"
    folder.mkdir(parents=True)
    component = {"name": "rollout", "job_id": "local-1", "tasks": 1}
    write_json(
        run.launch_record,
        {"mode": "local", "leader": "local-1", "components": [component], "time": 0,
         "controller": {"pid": controller.pid, "start_time": controller.start_time}},
    )  # fmt: skip
    return run


def test_gc_refuses_while_the_run_is_alive_and_works_once_it_has_ended(tmp_path):
    with subprocess.Popen(["sleep", "60"]) as process:
        run = make_run(tmp_path, ProcessId.of(process.pid))
        result = invoke("gc", run.root)
        process.terminate()
    assert isinstance(result.exception, LaunchError)
    assert "wait for its end, or end it: relax-hpc cancel" in str(result.exception)
    before = set(run.bus.root.rglob("*.h5"))
    dry = invoke("gc", run.root, "--dry-run")
    assert "would free" in dry.output
    assert "6 retired shards" in dry.output
    assert set(run.bus.root.rglob("*.h5")) == before
    done = invoke("gc", run.root)
    assert "freed" in done.output
    assert len(set(run.bus.root.rglob("*.h5"))) == 2  # step 4, which is not planned yet


# ------------------------------------------------- what other policies leave


def test_what_was_dropped_over_age_and_what_is_partial_is_neither_wrong_nor_needed(tmp_path):
    paths = made.make_bus(tmp_path, ["rollout-0"])
    options = {"prompts_per_step": 2, "over_age": "drop", "max_staleness": 1}
    with Producer(paths, "rollout-0", {}) as producer:
        producer.put([made.group(0), made.group(1)])
        producer.put([made.group(2), made.group(3)])
        producer.put([made.group(4, version=2), made.group(5, version=2)])
        producer.put_partial([made.group(6, version=2)])
    with made.sequencer(paths, **options) as sequencer:
        made.batch(sequencer, 1)
        made.batch(sequencer, 2)  # guids 2, 3 are 1 step stale: just allowed
        position = sequencer.position
    with Producer(paths, "rollout-0", {}) as producer:
        producer.put([made.group(8)])  # of policy 0: too old for step 3
    with made.sequencer(paths, position, **options) as sequencer:
        made.batch(sequencer, 3)
        with Producer(paths, "rollout-0", {}) as producer:
            [owed] = sequencer._credit.owed
            assert producer.owe_again([owed]) == [8]
            producer.put([made.group(8, version=3), made.group(7, version=3)])
        made.batch(sequencer, 4)
        found = check(paths, [position, sequencer.position])
        assert found.findings == []
        sequencer.release(3)
    row = show.list_writers(paths, None).writers[0]
    # 0 1 | 2 3 | 4 5 | partial 6 | 8 | 8 7; the partial group is no committed trajectory
    assert (row.live_shards, row.trajectories) == (6, 2 * 9)
    gone = {int(file.path.stem) for file in garbage.find(paths, [sequencer.position]).retired}
    assert gone == {0, 1, 2}
    paths.shard("rollout-0", 1, 3).unlink()
    assert check(paths).is_sound  # partial groups are only their owner's concern
    assert show.list_writers(paths, None).writers[0].missing_shards == 0


def test_a_damaged_shard_that_the_plan_has_set_aside_is_told_and_not_wrong(tmp_path):
    paths = made.make_bus(tmp_path, ["rollout-0"])
    made.produce(paths, "rollout-0", range(4), per_shard=2)
    path = paths.shard("rollout-0", 1, 0)
    path.write_bytes(path.read_bytes()[:100])
    [(kind, what)] = wrong(check(paths))
    assert (kind, "is torn" in what) == ("shard", True)
    with made.sequencer(paths, prompts_per_step=2) as sequencer:
        sequencer.look()
        with Producer(paths, "rollout-0", {}) as producer:
            producer.put([made.group(0), made.group(1)])
        made.batch(sequencer, 1)
    found = check(paths)
    assert found.is_sound
    [finding] = found.findings
    assert "set it aside" in finding.what


# ---------------------------------------------------------------- the commands


def test_the_commands_work_on_a_run_directory_and_say_what_they_allow(tmp_path):
    with subprocess.Popen(["sleep", "60"]) as process:
        run = make_run(tmp_path, ProcessId.of(process.pid))
        process.terminate()
    assert "step 3: 3 records of plan fence" in invoke("ls", run.root).output
    assert "4 prompt groups" in invoke("show", run.root, "--step", 2).output
    shard = run.bus.shard(*SHARD)
    assert "all checksums match" in invoke("show", shard).output
    assert invoke("verify", run.root).exit_code == 0
    target = tmp_path / "o.parquet"
    assert "16 rows" in invoke("export", run.root, "--to", target, "--step", "1:2").output
    run.bus.shard("rollout-0", 1, 3).unlink()
    damaged = invoke("verify", run.root, "--json")
    assert damaged.exit_code == 1
    assert json.loads(damaged.stdout)["findings"][0]["kind"] == "missing"
