"""Programs that want out of the sandbox, or more than they may have."""

import contextlib
import os
import re
import shutil
import socket
import sys
import time
from pathlib import Path

import psutil
import pytest

from relax_hpc.environments.rewards import sandbox, sandbox_stage
from relax_hpc.environments.rewards.sandbox import (
    Program,
    ProgramLimits,
    SandboxError,
    check_sandbox,
    run,
)
from relax_hpc.errors import ConfigError

SMALL = ProgramLimits(
    deadline_s=30, memory_bytes=256 << 20, disk_bytes=8 << 20, output_bytes=1 << 20
)
SHORT = SMALL._replace(deadline_s=0.15)
SOON_S = 10
"""Less than anything here takes that is not ended; it is ended within a second of its deadline."""


def why_no_bubblewrap():
    try:
        check_sandbox("bubblewrap")
    except ConfigError as error:
        return str(error)
    return ""


REASON = why_no_bubblewrap()
isolated = pytest.mark.skipif(bool(REASON), reason=REASON)
in_both = pytest.mark.parametrize("kind", [pytest.param("bubblewrap", marks=isolated), "limits"])


@pytest.fixture(autouse=True)
def nobody_is_left():
    own = psutil.Process()
    before = set(own.children(recursive=True))
    yield
    assert set(own.children(recursive=True)) <= before


def printed(text, kind="bubblewrap", limits=SMALL):
    outcome = run(Program(text), limits, kind)
    assert outcome.is_well, text
    return outcome.output.split()


@in_both
def test_a_function_returns_a_value_and_a_test_passes(kind):
    text = (
        "class Solution:\n    def add(self, a, b):\n        print(a)\n        return (a + b, {b})"
    )
    outcome = run(Program(text, function="add", arguments=[1, 2]), SMALL, kind)
    assert outcome.has_value and outcome.value == [3, [2]]
    right, wrong = (f"assert Solution().add(1, 2)[0] == {number}" for number in (3, 4))
    assert run(Program(text, test=right), SMALL, kind).passed
    assert not run(Program(text, test=wrong), SMALL, kind).passed


@in_both
def test_the_same_program_prints_the_same_twice(kind):
    text = "print(list({'a', 'b', 'c', 'd', 'e', 'f'}), hash('x'))"
    assert printed(text, kind) == printed(text, kind)


@in_both
@pytest.mark.parametrize(
    "text",
    ["import os; os._exit(0)", "raise SystemExit(0)", "import os\nos.write({reply}, b'x' * 32)",
     "import os\nfor fd in range(3, 60):\n  try: os.write(fd, b'passed')\n  except OSError: 0",
     "def f(): pass"],
)  # fmt: skip
def test_a_program_that_ends_early_or_replies_itself_has_not_passed(kind, text):
    outcome = run(Program(text.replace("{reply}", "4"), test="assert f() == 1"), SMALL, kind)
    assert not outcome.passed


@in_both
@pytest.mark.parametrize(
    "text",
    ["1 / 0", "import sys; sys.exit(3)", "import os; os._exit(3)", "def", "\udc80",
     "import os; os.abort()", "import ctypes; ctypes.string_at(0)",
     "import os; os.execv('/bin/false', ['false'])"],
)  # fmt: skip
def test_a_program_that_does_not_end_well_is_told_from_one_that_does(kind, text):
    assert not run(Program(text), SMALL, kind).is_well


CONNECTS = """
import socket
try:
    socket.create_connection(("127.0.0.1", {port}), 0.3)
    print("in")
except OSError:
    print("out")
"""


@pytest.mark.parametrize(
    ("kind", "there"), [pytest.param("bubblewrap", "out", marks=isolated), ("limits", "in")]
)
def test_the_network_is_out_of_reach(kind, there):
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert printed(CONNECTS.format(port=server.getsockname()[1]), kind) == [there]
    link = "/proc/self/ns/net"
    [own] = printed(f"import os\nprint(os.readlink({link!r}))", kind)
    assert (own == str(Path(link).readlink())) is (there == "in")


@isolated
def test_files_of_the_host_are_out_of_reach(tmp_path):
    own = tmp_path / "secret"
    own.write_text("7")
    repository = Path(__file__).parents[3]
    files = [own, repository, Path("/etc/shadow"), Path("/etc/passwd"), Path("/run"), Path("/var")]
    there = f"import os\nprint(*[os.path.exists(f) for f in {[*map(str, files)]}])"
    assert printed(there) == len(files) * ["False"]
    assert printed(there, "limits")[0] == "True"  # it does look
    # Of a home, only the way to the Python that is used is there.
    way = "import os, sys\nprint(*os.listdir(os.path.expanduser({home!r})))"
    if Path(sys.base_prefix).resolve().is_relative_to(Path.home()):
        [first, *_] = Path(sys.base_prefix).resolve().relative_to(Path.home()).parts
        assert printed(way.format(home=str(Path.home()))) == [first]
    assert printed("import os\nprint(*sorted(os.environ))") == [
        "HOME", "LANG", "PATH", "PWD", "PYTHONDONTWRITEBYTECODE", "PYTHONHASHSEED", "TMPDIR",
    ]  # fmt: skip


@isolated
@pytest.mark.parametrize("place", [".", ".local", ".."])
def test_of_a_python_that_is_installed_in_a_home_no_more_is_seen_than_it_needs(
    tmp_path, monkeypatch, place
):
    home = tmp_path / "homes" / "me"
    prefix = home / place
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    (prefix / "bin").mkdir(parents=True)
    (prefix / "lib").mkdir()
    real = Path(sys.base_prefix).resolve()
    program = prefix / "bin" / version
    shutil.copy(Path(sys._base_executable).resolve(), program)
    (prefix / "lib" / version).symlink_to(real / "lib" / version)
    for library in real.glob("lib/libpython*"):
        (prefix / "lib" / library.name).symlink_to(library)
    secrets = [prefix / "secret", prefix / "bin" / "secret", prefix / "lib" / "secret"]
    for each in secrets:
        each.touch()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(sys, "base_prefix", str(prefix))
    there = f"import os, sys\nprint(sys.prefix, *map(os.path.exists, {[*map(str, secrets)]}))"
    assert printed(there) == [str(prefix.resolve()), "False", "False", "False"]
    monkeypatch.setattr(sys, "base_prefix", str(home / "python"))  # a folder of its own
    assert str(home / "python") in sandbox._isolate(SMALL).command


@isolated
def test_the_processes_of_the_host_are_not_seen_and_no_power_is_left():
    seen = "import os\nprint(os.getpid(), *[p for p in os.listdir('/proc') if p.isdigit()])"
    own, *others = printed(seen)
    assert own in others and len(others) <= 3 and max(map(int, others)) < 10
    powers = "print(*[line.split()[1] for line in open('/proc/self/status') if 'CapEff' in line])"
    assert printed(powers) == ["0000000000000000"]
    assert printed("import os\nprint(os.getuid(), os.uname().nodename)") == ["65534", "sandbox"]


WRITES = """
import os
for folder, folders, files in os.walk("/"):
    if folder.count("/") >= 3 - folder.startswith("/usr") and not folder.startswith("/proc/sys"):
        del folders[:]
    devices = folder.startswith("/dev")
    for place in [f"{folder}/new", *(f"{folder}/{name}" for name in files if not devices)]:
        try:
            if not os.path.islink(place):
                os.close(os.open(place, os.O_WRONLY | os.O_CREAT))
                print(place)
        except OSError:
            pass
"""


@isolated
def test_nothing_but_its_own_folder_can_be_written_to():
    assert printed(WRITES) == ["/tmp/new"]


TAKES = """
import ctypes, fcntl, mmap, os
def refused(take):
    try:
        take()
    except (MemoryError, OSError, RuntimeError):
        return True
libc = ctypes.CDLL(None, use_errno=True)
def called(number, *args):
    if libc.syscall(number, *args) < 0:
        raise OSError
def grown_pipe():
    fcntl.fcntl(os.pipe()[1], fcntl.F_SETPIPE_SZ, 1 << 20)
calls = {calls}
print(refused(lambda: bytearray(1 << 30)), refused(lambda: mmap.mmap(-1, 1 << 30)),
      refused(lambda: os.memfd_create("x")), refused(lambda: [0] * 10**9), refused(grown_pipe),
      *(refused(lambda: called(*call)) for call in calls))
"""


@in_both
def test_memory_is_refused_in_every_form(kind):
    """S7: the kernel's own, too, which no limit counts; each call would be granted otherwise."""
    place = sandbox_stage._MACHINES[os.uname().machine][1]
    args = {"shmget": (0, 1 << 30, 0o1600), "semget": (0, 32_000, 0o1600), "msgget": (0, 0o1600),
            "memfd_secret": (0,), "io_setup": (100, b"\0" * 8), "inotify_init1": (0,),
            "timer_create": (0, 0, b"\0" * 8), "landlock_create_ruleset": (0, 0, 1)}  # fmt: skip
    calls = [(sandbox_stage._REFUSED[name][place], *rest) for name, rest in args.items()]
    taken = TAKES.replace("{calls}", repr(calls))
    assert printed(taken, kind) == (5 + len(calls)) * ["True"]


HOLDS = """
import socket
for family in range(46):
    for kind in (1, 2, 3, 5):
        try:
            socket.socket(family, kind)
            print(family)
        except OSError:
            pass
near, far = socket.socketpair()
near.send(b"x")
print(far.recv(1).decode())
"""


@in_both
def test_a_program_without_a_network_has_no_sockets_and_others_those_of_a_network(kind):
    """S7: the kernel keeps what is sent to nobody, and some families are in no namespace."""
    families = {"bubblewrap": set(), "limits": {"1", "2", "10"}}
    *found, received = printed(HOLDS, kind)
    assert set(found) <= families[kind] and received == "x"
    assert kind == "bubblewrap" or "2" in found


FILLS = """
written = number = 0
try:
    while number < 40:
        with open(f"{folder}/{number}", "wb", buffering=0) as file:
            written += file.write(bytes(1 << 20))
        number += 1
except OSError:
    pass
print(written)
"""


@isolated
def test_the_disk_is_refused():
    [written] = printed(FILLS.replace("{folder}", "/tmp"))
    assert 4 << 20 < int(written) <= 8 << 20


CROWDS = """
import os, time
{first}
for n in range({number}):
    {make}
time.sleep({rest})
"""


@isolated
@pytest.mark.parametrize("make", ["open(f'{n}', 'w').close()", "os.symlink('x', f'{n}')"])
@pytest.mark.parametrize("first", ["", "os.closerange(0, 60)"])
def test_a_program_that_makes_files_without_end_is_ended(make, first):
    """S7: none of them takes space."""
    text = CROWDS.format(first=first, make=make, number=sandbox._MOST_ENTRIES + 1, rest=1000)
    begun = time.monotonic()
    assert not run(Program(text), SMALL, "bubblewrap").is_well
    assert time.monotonic() - begun < SMALL.deadline_s
    few = CROWDS.format(first=first, make=make, number=1000, rest=2 * sandbox._LOOK_S)
    assert run(Program(few), SMALL, "bubblewrap").is_well


@isolated
def test_files_of_the_node_do_not_end_a_program_whose_sandbox_takes_long_to_begin(
    tmp_path, monkeypatch
):
    """S7: until it has its root, bubblewrap sees the node's /tmp, which may hold any number."""
    slow = tmp_path / "bwrap"
    pause = f"sleep {3 * sandbox._LOOK_S} & wait"
    slow.write_text(f'#!/bin/sh\n{pause}\nexec {shutil.which("bwrap")} "$@"\n', encoding="utf-8")
    slow.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(sandbox, "_MOST_ENTRIES", 50)
    assert printed("print(42)") == ["42"]


@in_both
def test_a_file_is_bounded(kind):
    large = "import os\ntry: open('large', 'wb').write(bytes(20 << 20))\nexcept OSError: print(1)"
    assert printed(large, kind) == ["1"]


STARTS = """
import os, subprocess, threading
def refused(start):
    try:
        start()
    except OSError:
        return True
print(refused(os.fork), refused(lambda: subprocess.run(["/bin/true"])),
      refused(lambda: os.posix_spawn("/bin/true", ["true"], {})))
thread = threading.Thread(target=print, args=("thread",))
thread.start()
thread.join()
"""
BOMB = """
import os, threading
def bomb():
    while True:
        try:
            if os.fork() == 0:
                os.setsid()
        except OSError:
            pass
        try:
            threading.Thread(target=bomb).start()
        except RuntimeError:
            pass
bomb()
"""


@in_both
def test_a_program_starts_no_other_but_threads(kind):
    assert printed(STARTS, kind) == ["True", "True", "True", "thread"]


CALLS = """
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
for number in {numbers}:
    failed = libc.syscall(number, 0, 0, 0, 0, 0) == -1
    print(failed and errno.errorcode[ctypes.get_errno()])
"""


@in_both
def test_calls_of_the_kernel_that_would_lead_around_limits_are_refused(kind):
    place = sandbox_stage._MACHINES[os.uname().machine][1]
    clone, clone3 = (sandbox_stage._CALLS[name][place] for name in ("clone", "clone3"))
    refused = [call[place] for call in sandbox_stage._REFUSED.values()]
    refused = [number for number in refused if number < 1024]
    errors = printed(CALLS.format(numbers=[*refused, clone, clone3, 468, 511]), kind)
    assert errors == (len(refused) + 1) * ["EAGAIN"] + 3 * ["ENOSYS"]


def test_numbers_of_calls_are_those_of_the_kernel():
    """S7: of both processors, as the headers say them, where they are installed."""
    headers = {
        0: "/usr/include/x86_64-linux-gnu/asm/unistd_64.h",
        1: "/usr/include/asm-generic/unistd.h",
    }
    for place, header in headers.items():
        if not Path(header).exists():
            continue
        text = Path(header).read_text("utf-8")
        said = dict(re.findall(r"#define __NR(?:3264)?_(\w+) (\d+)", text))
        for name, numbers in (sandbox_stage._REFUSED | sandbox_stage._CALLS).items():
            if name in said and numbers[place] < 1024:
                assert said[name] == str(numbers[place]), (name, place)


@in_both
def test_a_gigabyte_of_output_is_not_read(kind):
    text = "import os\nfor _ in range(1 << 14): os.write(1, bytes(1 << 16))"
    begun = time.monotonic()
    outcome = run(Program(text), SMALL, kind)
    assert not outcome.is_well and time.monotonic() - begun < SOON_S
    assert SMALL.output_bytes < len(outcome.output) < 2 * SMALL.output_bytes


SLEEPS = {
    "blocked": "import signal, time\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\n"
    "time.sleep(1000)",
    "deaf": "import signal\nfor n in {*range(1, 32)} - {9, 19}: signal.signal(n, signal.SIG_IGN)\n"
    "while True: pass",
    "closed": "import os, time\nos.closerange(0, 60)\ntime.sleep(1000)",
    "bomb": BOMB,
    "regex": "import re\nre.match('(a+)+b', 'a' * 50)",
    "thread": "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,)).start()",
}


@in_both
@pytest.mark.parametrize("text", SLEEPS.values(), ids=SLEEPS)
def test_what_does_not_end_is_ended_in_time(kind, text):
    begun = time.monotonic()
    assert not run(Program(text), SHORT, kind).is_well
    assert time.monotonic() - begun < SOON_S


@in_both
def test_its_folder_is_empty_and_is_gone_afterwards(kind):
    text = "import os\nprint(os.getcwd(), len(os.listdir()))\nopen('x', 'w').write('y')"
    for _ in range(2):
        folder, number = printed(text, kind)
        assert number == "0" and not (kind == "limits" and Path(folder).exists())


def test_the_reason_why_bubblewrap_refuses_is_said(monkeypatch, tmp_path):
    program = tmp_path / "bwrap"
    program.write_text(
        "#!/bin/sh\necho bwrap: No permissions to create new namespace >&2\nexit 1\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    reason = "bwrap: No permissions to create new namespace"
    with pytest.raises(ConfigError, match=f'"bubblewrap": {reason}; have the package'):
        check_sandbox("bubblewrap")
    with pytest.raises(SandboxError, match=reason):
        run(Program("print(1)"), SMALL, "bubblewrap")


def test_a_processor_without_a_list_of_calls_is_refused(monkeypatch, tmp_path):
    stage = tmp_path / "stage.py"
    text = sandbox._STAGE.read_text()
    stage.write_text(text.replace('"x86_64":', '"vax":').replace('"aarch64":', '"pdp":'))
    monkeypatch.setattr(sandbox, "_STAGE", stage)
    with pytest.raises(ConfigError, match='sandbox = "limits": no sandbox for processors'):
        check_sandbox("limits")


CALLER = """
import sys
from relax_hpc.environments.rewards.sandbox import ProgramLimits, Program, run
limits = ProgramLimits(300, memory_bytes=256 << 20, disk_bytes=8 << 20, output_bytes=1 << 20)
run(Program("import time; time.sleep(300)"), limits, "bubblewrap")
"""


@isolated
def test_a_program_goes_with_the_process_that_asked_for_it_however_that_ends():
    """Killed by SIGKILL it cleans up nothing itself."""
    caller = psutil.Popen([sys.executable, "-c", CALLER])
    deadline = time.monotonic() + 60
    while len(inside := caller.children(recursive=True)) < 2:
        assert time.monotonic() < deadline and caller.poll() is None
        time.sleep(0.05)
    caller.kill()
    caller.wait()
    try:
        assert psutil.wait_procs(inside, timeout=60)[1] == []
    finally:
        for each in inside:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
