"""Two hosts and an NFS server on this machine: three User Mode Linux kernels on one bridge.

What the hosts mount is the Linux kernel's own NFS 4.2 client with its default caches, served by the
Linux kernel's own server; each host has its caches for itself. All of it lives in a network and a
process namespace of its own and ends with it.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from nfs_guest import SERVER

HERE = Path(__file__).parent
ADDRESSES = {"server": SERVER, "alpha": "10.77.0.2", "beta": "10.77.0.3"}
OPTIONS = "vers=4.2,sec=sys"
UP_S, STOP_S = 60, 20
DISK_BYTES = 1 << 30


class Job:
    """A command on a host."""

    def __init__(self, order):
        self._order = order

    @property
    def out(self):
        return _text(self._order.with_suffix(".out"))

    @property
    def err(self):
        return _text(self._order.with_suffix(".err"))

    def wait(self, timeout_s=60):
        """Its exit code."""
        result = self._order.with_suffix(".rc")
        _await(result.exists, timeout_s, lambda: f"{self._order.read_text()}: {self.err}")
        return int(result.read_text())

    def kill(self):
        self._order.with_suffix(".kill").touch()
        return self.wait()


class Host:
    """One guest; paths of this machine are the same there, MOUNT is the shared file system."""

    def __init__(self, work, name):
        self.work = work
        self._inbox = work / name
        self._numbers = count()

    def start(self, *words):
        """Starts a command, or a role of bus_roles.py: "role" and its words."""
        order = self._inbox / f"{next(self._numbers)}.json"
        draft = order.with_name(".order")
        draft.write_text(json.dumps([str(word) for word in words]))
        draft.rename(order)
        return Job(order)

    def crash(self):
        """Power off and on: what its caches held is lost, its processes are gone."""
        (self._inbox / "up").unlink()
        (self._inbox / "crash").touch()
        _await((self._inbox / "up").exists, UP_S, lambda: f"{self._inbox.name} did not come back")

    def run(self, *words, timeout_s=60):
        job = self.start(*words)
        code = job.wait(timeout_s)
        assert code == 0, f"{words}: exit {code}: {job.err}"
        return job.out


def missing():
    """Why there can be no such hosts here; None if there can."""
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        return "User Mode Linux runs on x86-64 Linux only"
    if os.geteuid():
        return "network devices of one's own need root"
    if not Path("/dev/net/tun").exists():
        return "there is no /dev/net/tun"
    if " amx_tile " in Path("/proc/cpuinfo").read_text(encoding="utf-8"):
        return "User Mode Linux 6.1 cannot give its programs registers as large as AMX makes them"
    programs = [p for p in ("linux.uml", "ip", "unshare", "mkfs.ext4") if not _which(p)]
    return f"not installed: {', '.join(programs)}" if programs else None


@contextmanager
def nfs_hosts(work, options=OPTIONS):
    """Yields two hosts that mount one NFS export at MOUNT.

    Args:
        work: an empty folder of this machine; the hosts see it at the same path.
    """
    for name in (*ADDRESSES, "kernels"):
        (work / name).mkdir()
    with (work / "disk").open("wb") as disk:
        disk.truncate(DISK_BYTES)
    subprocess.run([_which("mkfs.ext4"), "-q", "-F", work / "disk"], check=True)
    command = ["unshare", "--net", "--pid", "--fork", "--kill-child", sys.executable, __file__]
    with (work / "kernels.log").open("wb") as log:
        kernels = subprocess.Popen([*command, work, options], stdout=log, stderr=log)
    try:
        up = [work / name / "up" for name in ADDRESSES]
        _await(lambda: all(path.exists() for path in up), UP_S, lambda: _consoles(work), kernels)
        yield Host(work, "alpha"), Host(work, "beta")
    finally:
        for name in ("alpha", "beta", "server"):
            (work / name / "stop").touch()
        try:
            kernels.wait(STOP_S)
        except subprocess.TimeoutExpired:
            kernels.kill()
            kernels.wait()


def _text(file):
    return file.read_text() if file.exists() else ""


def _which(program):
    return shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


def _await(condition, timeout_s, explain, process=None):
    deadline = time.monotonic() + timeout_s
    while not condition():
        ended = process is not None and process.poll() is not None
        assert not ended and time.monotonic() < deadline, explain()
        time.sleep(0.02)


def _consoles(work):
    return "\n".join(path.read_text(errors="replace") for path in sorted(work.glob("*.log")))


def _boot(work, name, options):
    kernel = [_which("linux.uml"), f"umid={name}", f"uml_dir={work / 'kernels'}", "mem=512M", "ro"]
    root = ["rootfstype=hostfs", "rootflags=/"]
    disk = [f"ubd0={work / 'disk'}"] if name == "server" else []
    network = f"vec0:transport=tap,ifname=tap-{name},depth=128,gro=1"
    init = [f"init={sys.executable}", "--", HERE / "nfs_guest.py", work, name, ADDRESSES[name]]
    with (work / f"{name}-console.log").open("wb") as console:
        return subprocess.Popen(
            [*kernel, *root, *disk, network, "con=null", "con0=null,fd:1", *init, options],
            stdin=subprocess.DEVNULL, stdout=console, stderr=console, start_new_session=True,
        )  # fmt: skip


def _supervise(work, options):
    """Process 1 of the namespace: what it leaves running ends with it."""
    for words in (
        ["set", "lo", "up"],
        ["add", "bridge", "type", "bridge"],
        ["set", "bridge", "up"],
    ):
        subprocess.run([_which("ip"), "link", *words], check=True)
    for name in ADDRESSES:
        for words in (
            ["tuntap", "add", f"tap-{name}", "mode", "tap"],
            ["link", "set", f"tap-{name}", "master", "bridge", "up"],
        ):
            subprocess.run([_which("ip"), *words], check=True)
    kernels = {"server": _boot(work, "server", options)}
    _await((work / "server" / "up").exists, UP_S, lambda: "no server", kernels["server"])
    kernels |= {name: _boot(work, name, options) for name in ("alpha", "beta")}
    while any(kernel.poll() is None for kernel in kernels.values()):
        for name in kernels:
            crash = work / name / "crash"
            if crash.exists():
                os.killpg(kernels[name].pid, signal.SIGKILL)  # a kernel has helper processes
                kernels[name].wait()
                crash.unlink()
                kernels[name] = _boot(work, name, options)
        time.sleep(0.05)


if __name__ == "__main__":
    _supervise(Path(sys.argv[1]), sys.argv[2])
