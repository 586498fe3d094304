"""A trainer that no way leads from to engines that are healthy."""

import socket
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from relax_hpc.errors import PeerTimeoutError
from relax_hpc.inference import members
from relax_hpc.inference.members import EngineRegistry, Member
from relax_hpc.runtime.comm.address import hold_port
from relax_hpc.runtime.paths import RunPaths


@pytest.fixture
def look(tmp_path, monkeypatch):
    """Looks at these engines, by URL; says who answers of those named in `well`."""
    monkeypatch.setattr(members, "_SILENT_S", 0)
    paths = RunPaths(tmp_path)
    well = set()
    register = EngineRegistry(
        paths, lambda: list(urls), lambda m: SimpleNamespace(health=lambda _: m.id in well)
    )
    urls = {}

    def look(**now):
        urls.update(now)
        for name, url in now.items():
            members.announce(paths, Member(name, "s", url, 1, "embedded", "HEALTHY"))
        with ThreadPoolExecutor(2) as threads:
            return [member.id for member in register.live(threads)]

    look.well = well
    yield look


def test_one_that_no_way_leads_to_is_named_once_and_given_up_if_there_was_never_another(
    look, monkeypatch, caplog
):
    with hold_port("127.0.0.1") as port, socket.create_server(("127.0.0.1", 0)) as deaf:
        url, silent = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{deaf.getsockname()[1]}"
        assert look(a=url, b=silent) == look() == []
        [said] = [record.getMessage() for record in caplog.records]
        assert f"cannot reach engine a at 127.0.0.1:{port} within 1 s" in said
        assert "set launch.advanced.network" in said
        monkeypatch.setattr(members, "_GIVE_UP_S", 0)
        with pytest.raises(PeerTimeoutError, match="cannot reach engine a"):
            look()
        monkeypatch.setattr(members, "_GIVE_UP_S", 99)
        look.well.add("b")
        assert look() == ["b"]
        monkeypatch.setattr(members, "_GIVE_UP_S", 0)
        look.well.clear()
        assert look() == [], "it was there: its owner sees to it"
