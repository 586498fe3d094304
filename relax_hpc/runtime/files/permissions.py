"""Sets the permissions of a run's files, whatever the owner's umask, and checks who may replace
them.

Only the owner may read; with `launch.advanced.share = "group"` the group may, too. Every process
of a run writes files as open as the run directory.
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
from typing import NamedTuple

from relax_hpc.errors import ConfigError, LaunchError
from relax_hpc.runtime.files.storage import patiently
from relax_hpc.runtime.paths import RunPaths

WRITE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_LOOK = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_MOST_LINKS = 40
"""Most links of one path; the kernel's own limit."""


class Doubt(NamedTuple):
    """A reason why others may replace what is below a folder."""

    why: str
    remedy: str


def is_strange(user: int) -> bool:
    """Whether a user is neither this one nor root; root may have another number in a container."""
    return user not in (os.geteuid(), 0, os.stat("/proc").st_uid)  # noqa: PTH116


def is_own(found: os.stat_result) -> bool:
    """Whether something is this user's, and only this user's to write."""
    return found.st_uid == os.geteuid() and not found.st_mode & WRITE_BY_OTHERS


def others_write(found: os.stat_result) -> bool:
    """Whether anybody else may write there; a group of this user alone does not count."""
    writers = found.st_mode & WRITE_BY_OTHERS
    return bool(writers) and not (writers == stat.S_IWGRP and _is_own_group(found.st_gid))


def replaceable(path: Path) -> dict[Path, Doubt]:
    """Finds the folders and links of a path that others may replace.

    They may where they can write and no sticky bit protects other users' files, in their own
    folders, and through their own links. A path that does not exist counts as far as it does.
    """
    found, last = dict[Path, Doubt](), None
    try:
        for last, opened in _steps(path):
            status = os.fstat(opened)
            mode, is_link = stat.S_IMODE(status.st_mode), stat.S_ISLNK(status.st_mode)
            if is_strange(status.st_uid):
                what = "is a link" if is_link else "is"
                found[last] = Doubt(f"{what} of user {status.st_uid}", "choose another")
            elif others_write(status) and not (is_link or mode & stat.S_ISVTX):
                remedy = f"chmod +t {last}, which its owner may, or choose another"
                found[last] = Doubt(f"has mode {mode:04o}", remedy)
    except FileNotFoundError:
        return found
    if last is not None:  # the end of the way itself
        found.pop(last, None)
    return found


def doubt_of(path: Path) -> str:
    """Explains why others may have written a path, or something in it; "" if they cannot."""
    for where, doubt in replaceable(path).items():
        return f"{where} {doubt.why}"
    for each in (path, *(path.rglob("*") if path.is_dir() else ())):
        with suppress(FileNotFoundError):  # a link to nothing, or it was removed this moment
            found = each.stat()
            if is_strange(found.st_uid):
                return f"{each} is of user {found.st_uid}"
            if others_write(found):
                return f"{each} has mode {stat.S_IMODE(found.st_mode):04o}"
    return ""


def open_folder(path: Path) -> int:
    """Opens a folder as `dir_fd`, through no link of other users.

    Returns:
        A descriptor, to be closed. It stays this folder, whatever others do to the path.

    Raises:
        ConfigError: there is such a link.
        OSError: there is no such folder.
    """
    kept = os.open("/", _LOOK)
    try:
        for where, opened in _steps(path):
            status = os.fstat(opened)
            if not stat.S_ISLNK(status.st_mode):
                os.dup2(opened, kept, inheritable=False)
            elif is_strange(status.st_uid):
                raise ConfigError(
                    f"{where}: is a link of user {status.st_uid}, who may lead it anywhere; name "
                    "the folder that it leads to now"
                )
        if not stat.S_ISDIR(os.fstat(kept).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    except BaseException:
        os.close(kept)
        raise
    return kept


@contextmanager
def hold_folder(path: Path) -> Iterator[Path]:
    """Yields a path to a folder that stays valid whatever others do meanwhile.

    Raises:
        ConfigError: as `open_folder`, or others may write there.
    """
    folder = open_folder(path)
    try:
        found = os.fstat(folder)
        if found.st_uid != os.geteuid() or others_write(found):
            raise ConfigError(
                f"{path}: owner {found.st_uid}, mode {stat.S_IMODE(found.st_mode):04o}: others may "
                "write there; name another folder, or chmod go-w one of yours"
            )
        there = Path(f"/proc/self/fd/{folder}")
        for each in there.iterdir():
            if is_strange(owner := each.lstat().st_uid):
                raise ConfigError(f"{path / each.name}: is of user {owner}; remove it")
        yield there
    finally:
        os.close(folder)


def _steps(path: Path) -> Iterator[tuple[Path, int]]:
    """Opens the folders and links of a path, each by its name in the one before.

    Closes a descriptor when the next is requested.
    """
    here, folder = Path("/"), os.open("/", _LOOK)
    todo, num_links = [*reversed(path.absolute().parts[1:])], 0
    try:
        yield here, folder
        while todo:
            name = todo.pop()
            opened = _open(here / name, name, folder)
            try:
                is_link = stat.S_ISLNK(os.fstat(opened).st_mode)
                if is_link:
                    yield here / name, opened
                    target = Path(os.readlink("", dir_fd=opened))
                    num_links += 1
            except BaseException:
                os.close(opened)
                raise
            if not is_link:
                os.close(folder)
                here, folder = here / name, opened
                yield here, folder
                continue
            os.close(opened)
            if num_links > _MOST_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
            if target.is_absolute():
                os.close(folder)
                here, folder = Path("/"), os.open("/", _LOOK)
                target = target.relative_to("/")
            todo += reversed(target.parts)
    finally:
        os.close(folder)


def _open(path: Path, name: str, folder: int) -> int:
    try:
        if path.parent.match("/proc/*/fd"):  # leads to what is open, not to what its text says
            return os.open(name, os.O_PATH | os.O_CLOEXEC, dir_fd=folder)
        try:  # as a folder first: this alone has an automounter mount it
            return os.open(name, _LOOK | os.O_DIRECTORY, dir_fd=folder)
        except NotADirectoryError:
            return os.open(name, _LOOK, dir_fd=folder)
    except OSError as error:
        error.filename = str(path)
        raise


def _is_own_group(group: int) -> bool:
    """Whether the user is the only member of a group: many systems give everybody one."""
    try:
        user, entry = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    is_of_user = (entry.gr_gid, entry.gr_name) == (user.pw_gid, user.pw_name)
    return is_of_user and not set(entry.gr_mem) - {user.pw_name}


UMASKS = {"none": 0o077, "group": 0o027}
"""Umasks by `launch.advanced.share`."""
_ACLS = ("system.posix_acl_default", "system.posix_acl_access")
_OWN_RUN = "submit a run of your own"


@contextmanager
def set_umask(umask: int) -> Iterator[None]:
    """Sets the umask of the process (all threads) for the length of the block."""
    before = os.umask(umask)
    try:
        yield
    finally:
        os.umask(before)


def close_to_others(folder: Path, umask: int) -> None:
    """Makes a new folder, and all made in it later, as open as the umask says.

    Where the folder above has default ACLs (project folders often do), Linux applies them instead
    of the umask. The set-group-ID bit stays: that group reads shared files, and its quota counts.

    Raises:
        LaunchError: the file system opens it further all the same.
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
    """Makes later files of this process as readable as `folder`, and only the owner's to write."""
    os.umask(umask_of(folder))


def umask_of(folder: Path) -> int:
    """Returns the umask that `adopt` sets."""
    return ~stat.S_IMODE(patiently(folder, folder.stat).st_mode) & 0o777 | WRITE_BY_OTHERS


def enter(paths: RunPaths, *further: Path) -> None:
    """Begins a process of a run: checks that only its user owns the code, and adopts its
    permissions.

    Args:
        further: as in `check_run`.

    Raises:
        SystemExit: others may have replaced what it is about to run; prints one line.
    """
    try:
        check_run(paths, *further)
    except LaunchError as error:
        sys.exit(str(error))
    adopt(paths.root)


def check_run(paths: RunPaths, *further: Path, remedy: str = _OWN_RUN) -> None:
    """Applies `check_own` to a run: its job names commands, and copies of user programs are
    imported.

    Args:
        further: more folders and files to check.
        remedy: advice if they are another user's.

    Raises:
        LaunchError: a folder or file is another user's, or others may write to it.
    """

    def check(*found: Path) -> None:
        for each in found:
            with suppress(FileNotFoundError, NotADirectoryError):  # what is not there is not run
                check_own(each, remedy=remedy)

    check(paths.root, paths.config, paths.programs, *further)
    check(*patiently(paths.programs, lambda: list(paths.programs.rglob("*"))))


def check_change(paths: RunPaths, remedy: str) -> None:
    """Checks that a run is this user's alone before a command writes into it.

    Otherwise a link planted by another user could redirect the write.

    Args:
        remedy: advice if it is another user's.

    Raises:
        LaunchError: it is another user's, or others may write to it.
    """
    check_own(paths.root, paths.config, remedy=remedy)
    folders = (paths.control, paths.tensorboard, paths.bus.root, paths.checkpoints)
    check_own(*filter(Path.exists, folders), remedy=remedy)
    for each, doubt in replaceable(paths.root).items():
        if each.is_symlink() or is_strange(each.stat().st_uid):
            raise LaunchError(f"{paths.root}: {each} {doubt.why}, who may replace it; {remedy}")


def check_own(*paths: Path, remedy: str = _OWN_RUN) -> None:
    """Checks that nobody else can have written what this process is about to run.

    Args:
        remedy: advice if they are another user's.

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
        if found.st_mode & WRITE_BY_OTHERS:
            raise LaunchError(
                f"{entry}: others may write there what would run as you; see that nobody did, then "
                f"chmod -R go-w {path}"
            )


def refusal(error: OSError) -> str:
    """Names the owner of a file that cannot be read or written, and what to do.

    Names the folder if the file cannot be seen or was to be created.
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
