"""A run is its owner's alone, also below a project folder whose ACLs open what is made in it."""

import grp
import os
import pwd
import stat
import struct
from types import SimpleNamespace

import pytest
from file_systems import small_tmpfs

from relax_hpc.errors import LaunchError
from relax_hpc.runtime.files import permissions

USER, GROUP, OTHERS, ANYBODY = 0x01, 0x04, 0x20, 0xFFFFFFFF


def open_all_below(folder, *, group, others):
    """`setfacl -d -m u::rwx,g::...,o::...`: an access list in the kernel's own form."""
    entries = [(USER, 7), (GROUP, group), (OTHERS, others)]
    packed = b"".join(struct.pack("<HHI", tag, bits, ANYBODY) for tag, bits in entries)
    os.setxattr(folder, "system.posix_acl_default", struct.pack("<I", 2) + packed)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize(("share", "folder", "file"), [("none", 0o700, 0o600),
                                                       ("group", 0o750, 0o640)])  # fmt: skip
def test_what_a_run_leaves_is_closed_whatever_the_folder_above_hands_on(
    tmp_path, share, folder, file
):
    with small_tmpfs(tmp_path / "project", 4) as project:
        open_all_below(project, group=7, others=5)
        umask = permissions.UMASKS[share]
        run = project / "run"
        with permissions.set_umask(umask):
            run.mkdir()
            assert mode(run) == 0o775, "Linux leaves the umask alone here"
            permissions.close_to_others(run, umask)
            (run / "control").mkdir()
            (run / "control" / "record").touch()
        assert (mode(run), mode(run / "control")) == (folder, folder)
        assert mode(run / "control" / "record") == file


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
