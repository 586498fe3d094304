"""Init of a User Mode Linux guest: the NFS server, or a host that mounts it and runs commands.

The guest sees the machine's own root read-only, and its work folder writable at the same path.
Commands and their results are files there.
"""

import ctypes
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path

import bus_roles

SERVER = "10.77.0.1"
EXPORT, RECOVERY, MOUNT = Path("/mnt/export"), Path("/mnt/recovery"), Path("/mnt/nfs")
INSECURE_PORT, NO_SUBTREE_CHECK, HAS_FSID = 0x2, 0x400, 0x2000
FOREVER = 2**31 - 1
POWER_OFF = 0x4321FEDC
FINIT_MODULE = 313  # x86-64
libc = ctypes.CDLL(None, use_errno=True)


def mount(source, target, kind, options=""):
    if libc.mount(source.encode(), str(target).encode(), kind.encode(), 0, options.encode()):
        code = ctypes.get_errno()
        raise OSError(code, f"mount -t {kind} {source}: {os.strerror(code)}")


def load(module):
    """Loads a kernel module behind those it needs; there may be no modprobe."""
    folder = Path("/usr/lib/uml/modules") / os.uname().release
    for line in (folder / "modules.dep").read_text().splitlines():
        file, needs = line.split(":")
        if Path(file).name == f"{module}.ko":
            for path in [*reversed(needs.split()), file]:
                with (folder / path).open("rb") as code:
                    libc.syscall(FINIT_MODULE, code.fileno(), b"", 0)


def set_up(work, name, address):
    mount("none", work, "hostfs", str(work))
    with (work / f"{name}.log").open("ab") as console:
        os.dup2(console.fileno(), 2)
    for kind, target in (("proc", "/proc"), ("sysfs", "/sys")):  # the kernel mounted /dev
        mount(kind, target, kind)
    Path("/dev/shm").mkdir(exist_ok=True)
    # Server and caches tell clients apart by this name: of two alike, each looks like a restart.
    socket.sethostname(name)
    for target in ("/dev/shm", "/mnt", "/run"):
        mount("tmpfs", target, "tmpfs")
    for words in (
        ["link", "set", "lo", "up"],
        ["addr", "add", f"{address}/24", "dev", "vec0"],
        ["link", "set", "vec0", "up"],
    ):
        subprocess.run(["ip", *words], check=True)


def serve():
    """Exports an ext4 file system, as exportfs, mountd and rpc.nfsd would."""
    load("nfsd")
    for folder in (EXPORT, RECOVERY):
        folder.mkdir()
    mount("/dev/ubda", EXPORT, "ext4")
    mount("nfsd", "/proc/fs/nfsd", "nfsd")
    nfsd, caches = Path("/proc/fs/nfsd"), Path("/proc/net/rpc")
    (nfsd / "nfsv4recoverydir").write_text(f"{RECOVERY}\n")
    (nfsd / "nfsv4gracetime").write_text("10\n")
    (nfsd / "versions").write_text("-3 +4 +4.1 +4.2\n")  # the only ones that need no rpcbind
    (nfsd / "threads").write_text("8\n")
    flags = INSECURE_PORT | NO_SUBTREE_CHECK | HAS_FSID
    for host in range(2, 32):
        (caches / "auth.unix.ip/channel").write_text(f"nfsd 10.77.0.{host} {FOREVER} all\n")
    (caches / "nfsd.export/channel").write_text(f"all {EXPORT} {FOREVER} {flags} 65534 65534 0\n")
    (caches / "nfsd.fh/channel").write_text(f"all 1 \\x00000000 {FOREVER} {EXPORT}\n")
    (nfsd / "v4_end_grace").write_text("Y\n")


def connect(address, options):
    load("nfsv4")
    MOUNT.mkdir()
    mount(f"{SERVER}:/", MOUNT, "nfs4", f"{options},addr={SERVER},clientaddr={address}")


def obey(inbox):
    """Runs what is asked for in `<n>.json`, each beside the others, until `stop` appears."""
    running, seen = {}, {order.stem for order in inbox.glob("*.json")}  # from before a crash
    (inbox / "up").touch()
    while not (inbox / "stop").exists():
        for order in sorted(inbox.glob("*.json")):
            if order.stem not in seen:
                seen.add(order.stem)
                running[begin(order)] = order.stem
        for process, number in list(running.items()):
            if (inbox / f"{number}.kill").exists():
                os.kill(process, signal.SIGKILL)
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                del running[process]
                draft = inbox / f".{number}"
                draft.write_text(str(os.waitstatus_to_exitcode(status)))
                draft.rename(inbox / f"{number}.rc")
        time.sleep(0.02)


def begin(order):
    """A process of its own; a role is forked, so that it need not import everything again."""
    words = json.loads(order.read_text())
    with order.with_suffix(".out").open("wb") as out, order.with_suffix(".err").open("wb") as err:
        process = os.fork()
        if process == 0:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            if words[0] == "role":
                bus_roles.run(*words[1:])
            resource.setrlimit(resource.RLIMIT_NOFILE, (65536, 65536))
            os.execvp(words[0], words)
    return process


def main(work, name, address, options):
    os.environ.update(PATH="/usr/sbin:/usr/bin:/sbin:/bin", HOME="/run", TMPDIR="/run")
    os.environ.update(PYTHONDONTWRITEBYTECODE="1", OMP_NUM_THREADS="1")
    set_up(work, name, address)
    serve() if name == "server" else connect(address, options)
    obey(work / name)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), *sys.argv[2:5])  # the kernel adds words of its own
    except BaseException:
        traceback.print_exc()  # before the power is off
        raise
    finally:
        os.sync()
        libc.reboot(POWER_OFF)
