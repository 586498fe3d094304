"""Permissions of what a run leaves, whatever the umask of its owner.

The owner, and nobody else; with `launch.share = "group"` its group may read. A run directory is
made so, and whatever a process of the run makes in it is as open as the folder that it was given.
"""

import errno
import grp
import os
import pwd
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from relax_hpc.errors import LaunchError
from relax_hpc.paths import RunPaths
from relax_hpc.storage import patiently

UMASKS = {"none": 0o077, "group": 0o027}
"""Umasks by `launch.share`."""
_ACLS = ("system.posix_acl_default", "system.posix_acl_access")
_WRITE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_OWN_RUN = "submit a run of your own"


@contextmanager
def masked(umask: int) -> Iterator[None]:
    """Within it the process, all threads of it, has that umask."""
    before = os.umask(umask)
    try:
        yield
    finally:
        os.umask(before)


def close_to_others(folder: Path, umask: int) -> None:
    """Makes a new folder as open as the umask says, and what is made in it later, too.

    Where the folder above has default ACLs (project folders often have), Linux passes them on and
    leaves the umask alone. What it hands on of its group (set-group-ID) stays: others of that group
    read what is shared, and its quota counts.

    Raises:
        LaunchError: its file system opens it further all the same.
    """
    for name in _ACLS:
        try:
            os.removexattr(folder, name)
        except OSError as error:
            if error.errno not in (errno.ENODATA, errno.EOPNOTSUPP):
                raise
    folder.chmod(0o777 & ~umask | folder.stat().st_mode & stat.S_ISGID)
    found = stat.S_IMODE(folder.stat().st_mode) & 0o777
    if found & umask:
        raise LaunchError(
            f"{folder}: mode {found:04o}, and the file system lets it be no {0o777 & ~umask:04o}: "
            "others could read or write what is yours; choose another run_root"
        )


def adopt(folder: Path) -> None:
    """Makes whatever this process writes from here on as readable as `folder`, and its owner's
    to write."""
    os.umask(umask_of(folder))


def umask_of(folder: Path) -> int:
    """Returns the umask under which a file is as readable as `folder`, and its owner's to write."""
    return ~stat.S_IMODE(patiently(folder, folder.stat).st_mode) & 0o777 | _WRITE_BY_OTHERS


def enter(paths: RunPaths, *further: Path) -> None:
    """Begins a process of a run: it runs only what is of its user, and leaves what it writes as
    readable as the run directory.

    Args:
        paths: of the run.
        further: as in `check_run`.

    Raises:
        SystemExit: others may have put there what it is about to run; says so in one line.
    """
    try:
        check_run(paths, *further)
    except LaunchError as error:
        sys.exit(str(error))
    adopt(paths.root)


def check_run(paths: RunPaths, *further: Path, remedy: str = _OWN_RUN) -> None:
    """Does as `check_own` for a run: its job names commands, and the copies of its owner's programs
    are imported.

    Args:
        paths: of the run.
        further: folders and files of it that are to be its owner's alone, too.
        remedy: where they are another user's.

    Raises:
        LaunchError: a folder or file is another user's, or others may write to it.
    """

    def check(*found: Path) -> None:
        for each in found:
            with suppress(FileNotFoundError, NotADirectoryError):  # what is not there is not run
                check_own(each, remedy=remedy)

    check(paths.root, paths.config, paths.programs, *further)
    check(*patiently(paths.programs, lambda: list(paths.programs.rglob("*"))))


def check_own(*paths: Path, remedy: str = _OWN_RUN) -> None:
    """Makes sure that nobody else can have put there what this process is about to run.

    Args:
        paths: of folders and files.
        remedy: where they are another user's.

    Raises:
        LaunchError: a folder or file is another user's, or others may write to it.
    """
    for path in paths:
        found = patiently(path, path.stat)
        entry = f"{path}: owner {found.st_uid}, mode {stat.S_IMODE(found.st_mode):04o}"
        if found.st_uid != os.geteuid():
            raise LaunchError(
                f"{entry}: is not of user {os.geteuid()}, and what lies there would run as that "
                f"user; {remedy}"
            )
        if found.st_mode & _WRITE_BY_OTHERS:
            raise LaunchError(
                f"{entry}: others may write there what would run as you; see that nobody did, then "
                f"chmod -R go-w {path}"
            )


def open_above(path: Path) -> dict[Path, int]:
    """Finds folders above a path, with their modes, where others may put something of theirs in its
    place.

    They may where they write and no sticky bit keeps them from what is another user's.
    """
    found = dict[Path, int]()
    for each in dict.fromkeys((*path.parents, *path.resolve().parents)):
        with suppress(FileNotFoundError):
            status = each.stat()
            writers = status.st_mode & _WRITE_BY_OTHERS
            if writers == stat.S_IWGRP and _is_own_group(status.st_gid):
                continue
            if writers and not status.st_mode & stat.S_ISVTX:
                found[each] = stat.S_IMODE(status.st_mode)
    return found


def _is_own_group(group: int) -> bool:
    """Whether a group is the user's alone, as many systems give one to everybody."""
    try:
        user, entry = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    is_of_user = (entry.gr_gid, entry.gr_name) == (user.pw_gid, user.pw_name)
    return is_of_user and not set(entry.gr_mem) - {user.pw_name}


def refusal(error: OSError) -> str:
    """Says whose it is what may not be read or written to, and what to do.

    Of a file that cannot even be seen, or was to be made, it is the folder that is named.
    """
    path = Path(error.filename).absolute()
    for each in (path, *path.parents):
        try:
            found = each.lstat()
        except OSError:
            continue
        me = os.geteuid()
        remedy = "change its mode" if found.st_uid == me else "ask its owner"
        return (
            f"{each}: is of user {_name_of(found.st_uid)}, mode {stat.S_IMODE(found.st_mode):04o}: "
            f"may not be read, or not be written to, by user {_name_of(me)}; {remedy}"
        )
    return f"{path}: {error.strerror}"


def _name_of(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)
