"""Faults of an engine's start are named, within the deadline, with what may help."""

import socket
import sys
from contextlib import contextmanager

import pytest

from relax_hpc.errors import EngineError
from relax_hpc.inference import process
from relax_hpc.inference.process import start_engine
from relax_hpc.inference.spec import EngineSpec
from relax_hpc.runtime.comm.address import hold_port

# In place of an interpreter with SGLang: binds what it is told to, and answers /health.
LISTENER = """\
#!{python}
import http.server, socketserver, sys
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
port = int(sys.argv[sys.argv.index("--port") + 1])
print("Uvicorn running on", port, flush=True)
socketserver.TCPServer.allow_reuse_address = True
socketserver.TCPServer(("127.0.0.1", port), Healthy).serve_forever()
"""


def start(kind, model, folder, python, **settings):
    return start_engine(
        EngineSpec(kind, model, **{"start_timeout_s": 240, **settings}),
        host="127.0.0.1", token="secret", python=str(python),
        log_path=folder / "engine.log",
    )  # fmt: skip


def script(folder, text):
    path = folder / "python"
    path.write_text(text.format(python=sys.executable))
    path.chmod(0o700)
    return path


@pytest.fixture
def taken():
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def giving(monkeypatch, ports):
    """Lets the search for a port find these first."""

    @contextmanager
    def found(host):
        if ports:
            yield ports.pop(0)
        else:
            with hold_port(host) as port:
                yield port

    monkeypatch.setattr(process, "hold_port", found)


def test_a_port_that_somebody_took_is_left_to_them(tmp_path, monkeypatch, taken):
    giving(monkeypatch, [taken, taken])
    with start("sglang", tmp_path, tmp_path, script(tmp_path, LISTENER)) as engine:
        assert not engine.url.endswith(f":{taken}")
        assert engine.is_healthy()
    assert engine.log_path.read_text().count("Address already in use") == 2


def test_a_killed_start_says_what_killed_it_and_when(tmp_path):
    killed = "#!/bin/sh\necho '[12:00:00] Load weight begin.'\nkill -KILL $$\n"
    with pytest.raises(EngineError, match=r"killed by SIGKILL while loading weights\nthe end of"):
        start("sglang", tmp_path, tmp_path, script(tmp_path, killed))
