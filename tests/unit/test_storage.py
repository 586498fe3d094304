"""Bad storage: which errors are waited out, for how long, what is told; and who may read a run."""

import errno
import grp
import json
import logging
import os
import pwd
import stat
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from file_systems import small_tmpfs

from relax_hpc.errors import LaunchError
from relax_hpc.runtime.files import permissions, records, storage
from relax_hpc.runtime.telemetry import logs
from relax_hpc.runtime.telemetry.events import EventWriter, parse


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(storage, "_FIRST_S", 0.0001)
    monkeypatch.setattr(storage, "_LONGEST_S", 0.01)
    yield
    storage.settle(0.0)


def fill(folder):
    """Takes all the room there is."""
    path = folder / "filling"
    with pytest.raises(OSError, match="No space"), path.open("ab", 0) as file:
        while True:
            file.write(bytes(4096))
    return path


def refused(code):
    """A call that always fails so."""

    def call(*_, **__):
        raise OSError(code, os.strerror(code))

    return call


class Call:
    """Fails with these errors, then says what it was called for."""

    def __init__(self, *codes):
        self._codes, self.count = list(codes), 0

    def __call__(self):
        self.count += 1
        if self._codes:
            refused(self._codes.pop(0))()
        return "done"


@pytest.mark.parametrize(
    "code",
    [errno.ESTALE, errno.EIO, errno.ENOSPC, errno.ENOTCONN, errno.ESHUTDOWN, errno.EREMOTEIO],
    ids=errno.errorcode.get,
)
def test_who_has_settled_waits_and_others_are_told_at_once(tmp_path, code):
    call = Call(code)
    with pytest.raises(OSError, match=os.strerror(code)):
        storage.patiently(tmp_path, call)
    assert call.count == 1
    storage.settle(60.0)
    call = Call(code, code, code)
    assert storage.patiently(tmp_path, call) == "done"
    assert call.count == 4


def test_other_errors_are_not_waited_out(tmp_path):
    storage.settle(60.0)
    for call in (Call(errno.EACCES), Call(errno.ESTALE, errno.EROFS)):
        with pytest.raises(OSError, match=r"denied|Read-only"):
            storage.patiently(tmp_path, call)
    with pytest.raises(OSError, match="No space"):
        storage.patiently(tmp_path, Call(errno.ENOSPC), errors=storage.PASSING)


def test_patience_ends_but_not_for_want_of_room(tmp_path):
    storage.settle(0.05)
    with pytest.raises(OSError, match="Stale"):
        storage.patiently(tmp_path, Call(*[errno.ESTALE] * 100_000))
    begun = time.monotonic()
    assert storage.patiently(tmp_path, Call(*[errno.EDQUOT] * 30)) == "done"
    assert time.monotonic() - begun > 0.1
    # A bad sector is damage sooner than a server is lost.
    storage.settle(60.0)
    with pytest.raises(OSError, match="Input/output"):
        storage.patiently(tmp_path, Call(*[errno.EIO] * 100_000), damage_s=0.02)
    assert storage.patiently(tmp_path, Call(*[errno.ESTALE] * 30), damage_s=0.0) == "done"


def test_a_record_that_is_published_once_is_the_writers_own_whatever_storage_says(tmp_path):
    storage.settle(60.0)
    real, path = os.link, tmp_path / "claim"

    def link(*args):
        real(*args)
        if not calls:
            calls.append(args)
            refused(errno.EIO)()

    for there in (False, True):
        calls = []
        path.unlink(missing_ok=True)
        if there:
            path.write_text("another's")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "link", link)
            assert records.write_json_once(path, {"mine": 1}) is not there
        assert [file.name for file in tmp_path.iterdir()] == ["claim"]


def test_two_writers_of_one_record_never_share_a_draft(tmp_path, monkeypatch):
    path, real, texts = tmp_path / "record.json", os.fsync, iter([{"second": 1}])

    def fsync(fd):
        for record in texts:
            records.write_json(path, record)
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    records.write_json(path, {"first": 1})
    assert records.read_json(path) == {"first": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["record.json"]


def test_small_records_find_room_on_a_full_disk_and_others_wait_until_there_is_some(tmp_path):
    with small_tmpfs(tmp_path / "full", 4) as root:
        reserve = root / "control" / "reserve"
        storage.settle(60.0, reserve=reserve)
        assert reserve.stat().st_size == storage.RESERVE_BYTES
        filling = fill(root)
        records.write_json(root / "control" / "record", {"n": 1})
        assert json.loads((root / "control" / "record").read_text()) == {"n": 1}
        os.truncate(filling, filling.stat().st_size - (1 << 18))  # there is room for it, no more
        assert storage.is_short() and not storage.restore_reserve()
        assert not list(root.glob("control/.reserve*")), "what is left is not taken"
        large, written = root / "large", []
        how = large, lambda: written.append(large.write_bytes(bytes(9)))
        shard = threading.Thread(target=storage.patiently, args=how)
        with pytest.MonkeyPatch.context() as patch:
            calls = iter([refused(errno.ENOSPC)])
            write = Path.write_bytes
            patch.setattr(Path, "write_bytes", lambda *args: next(calls, write)(*args))
            shard.start()
            shard.join(0.3)
            assert shard.is_alive() and not written, "it would fit, but small records come first"
            filling.unlink()
            shard.join(30)
        assert written == [9] and not storage.is_short()


def test_events_and_lines_that_find_no_room_are_dropped_and_counted(tmp_path):
    storage.settle(60.0)
    package = logging.getLogger("relax_hpc")
    with small_tmpfs(tmp_path / "full", 1) as root:
        path, log = root / "events" / "actor-0.jsonl", root / "logs" / "actor-0.log"
        logs.setup("actor", 0, log)
        with EventWriter(path, "actor", 0) as events:

            def tell(text):
                events.emit("error", message=text)
                package.warning(text)

            tell("first")
            filling = fill(root)
            for _ in range(3):
                tell("x" * 8192)
            filling.unlink()
            tell("last")
            tell("behind it")
        found = parse(path.read_bytes())
        said = log.read_text()
        logs.setup("actor", 0, None)
    told = [event.get("message", event.get("number")) for event in found]
    assert sorted(told, key=str) == [3, "behind it", "first", "last"]
    assert said.count(": first") == said.count(": last") == said.count(": behind it") == 1
    assert "3 lines were dropped" in said


def test_room_that_was_short_for_a_moment_is_not_short_for_good(tmp_path):
    reserve = tmp_path / "control" / "reserve"
    storage.settle(60.0, reserve=reserve)
    assert storage.patiently(tmp_path, Call(errno.ENOSPC), small=True) == "done"
    assert not reserve.exists()
    assert not storage.is_short()
    assert reserve.stat().st_size == storage.RESERVE_BYTES


# O3
@pytest.mark.parametrize("name", ["EOPNOTSUPP", "EPERM", "ENOSYS", "EINVAL"])
def test_without_hard_links_a_record_is_published_once_and_retracted(tmp_path, monkeypatch, name):
    monkeypatch.setattr(os, "link", refused(getattr(errno, name)))
    path = tmp_path / "record.json"
    assert records.write_json_once(path, {"by": 1})
    assert not records.write_json_once(path, {"by": 2})
    assert records.read_json(path) == {"by": 1}
    path.write_text("{}")  # who published it may replace it
    assert not records.write_json_once(path, {"by": 2})
    assert records.read_json(path) == {}
    records.retract(path)
    assert list(tmp_path.iterdir()) == []
    records.write_json(path, {"by": 3})
    assert not records.write_json_once(path, {"by": 2})
    records.retract(path)
    assert records.write_json_once(path, {"by": 4}) and records.read_json(path) == {"by": 4}


def test_of_many_writers_without_hard_links_one_succeeds_and_nobody_reads_half(
    tmp_path, monkeypatch
):  # O3
    monkeypatch.setattr(os, "link", refused(errno.EOPNOTSUPP))
    rounds, begin = 30, threading.Barrier(4)
    won, seen = [[] for _ in range(rounds)], [[] for _ in range(rounds)]

    def write(who):
        for number in range(rounds):
            path = tmp_path / f"{number}.json"
            begin.wait()
            if records.write_json_once(path, {"by": who, "text": "x" * 10_000}):
                won[number].append(who)
            seen[number].append(records.read_json(path)["by"])  # None, or half of it, would raise

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    assert [len(each) for each in won] == [1] * rounds
    assert all(set(found) == set(who) for found, who in zip(seen, won, strict=True))
    assert {file.suffix for file in tmp_path.iterdir()} == {".json", ".once"}, "no drafts are left"


def test_what_a_writer_that_died_had_claimed_is_published_by_the_next(tmp_path, monkeypatch):  # O3
    monkeypatch.setattr(os, "link", refused(errno.EOPNOTSUPP))
    monkeypatch.setattr(records, "_OTHER_S", 0.1)
    path = tmp_path / "record.json"

    def die(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(records, "write_bytes", die)
        with pytest.raises(KeyboardInterrupt):
            records.write_json_once(path, {"by": "the first"})
    assert records.read_json(path) is None
    assert not records.write_json_once(path, {"by": "the second"})
    assert records.read_json(path) == {"by": "the first"}


USER, GROUP, OTHERS, ANYBODY = 0x01, 0x04, 0x20, 0xFFFFFFFF


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize(("share", "folder"), [("none", 0o700), ("group", 0o750)])
def test_what_a_run_leaves_is_closed_whatever_the_folder_above_hands_on(tmp_path, share, folder):
    with small_tmpfs(tmp_path / "project", 4) as project:
        # `setfacl -d -m u::rwx,g::rwx,o::r-x`: an access list in the kernel's own form.
        entries = (USER, 7), (GROUP, 7), (OTHERS, 5)
        packed = b"".join(struct.pack("<HHI", tag, bits, ANYBODY) for tag, bits in entries)
        os.setxattr(project, "system.posix_acl_default", struct.pack("<I", 2) + packed)
        umask = permissions.UMASKS[share]
        run = project / "run"
        with permissions.set_umask(umask):
            run.mkdir()
            assert mode(run) == 0o775, "Linux leaves the umask alone here"
            permissions.close_to_others(run, umask)
            (run / "control").mkdir()
            (run / "control" / "record").touch()
        assert (mode(run), mode(run / "control")) == (folder, folder)
        assert mode(run / "control" / "record") == folder & 0o666


def test_what_a_run_leaves_is_of_the_group_that_the_folder_above_hands_on(tmp_path):
    project, group = tmp_path / "project", 60 if os.geteuid() == 0 else os.getgroups()[-1]
    project.mkdir()
    os.chown(project, -1, group)
    project.chmod(0o2770)
    (project / "run").mkdir()
    permissions.close_to_others(project / "run", permissions.UMASKS["group"])
    (project / "run" / "control").mkdir()
    (project / "run" / "control" / "record").touch()
    assert mode(project / "run") == 0o2750
    assert {path.stat().st_gid for path in project.rglob("*")} == {group}


def test_a_file_system_that_opens_all_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(type(tmp_path), "chmod", lambda *_: None)
    tmp_path.touch()
    os.chmod(tmp_path, 0o755)  # noqa: PTH101
    with pytest.raises(LaunchError, match="mode 0755, and the file system lets it be no 0700"):
        permissions.close_to_others(tmp_path, 0o077)


@pytest.mark.parametrize(
    ("members", "others_may"), [([], False), (["me"], False), (["me", "eve"], True)]
)
def test_a_group_of_ones_own_name_is_ones_own_unless_others_are_in_it(
    tmp_path, monkeypatch, members, others_may
):
    """Many systems give everybody a group: who adds a colleague to it lets them write."""
    me = SimpleNamespace(pw_name="me", pw_gid=tmp_path.stat().st_gid)
    mine = SimpleNamespace(gr_name="me", gr_gid=me.pw_gid, gr_mem=members)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: me)
    monkeypatch.setattr(grp, "getgrgid", lambda gid: mine)
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o775)
    assert (folder in permissions.replaceable(folder / "run")) is others_may
