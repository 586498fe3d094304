"""GPUs that were asked for and are not there: no task computes on CPUs instead, without a word."""

import dataclasses
import re
import socket

import pytest
import torch

from relax_hpc.comm import gpus
from relax_hpc.comm.torch_group import own_device
from relax_hpc.engines.embedded import server
from relax_hpc.engines.process import start_engine
from relax_hpc.engines.spec import EngineSpec
from relax_hpc.errors import ConfigError
from relax_hpc.launch import entry, local_step, preflight
from relax_hpc.launch.placement import Component
from relax_hpc.sections import Resources


@pytest.fixture(autouse=True)
def no_word(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def cards(monkeypatch):
    """Says how many GPUs there are."""

    def say(count):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(gpus, "count", lambda: count)

    return say


@pytest.mark.parametrize(
    ("asked", "visible", "found", "lacks"),
    [
        (0, None, 0, False),
        (0, "", 0, False),
        (4, None, 4, False),
        (4, "0,1,2,3", 3, True),
        (4, "0,1,2,3", 0, True),
        (4, None, 1, True),
        (4, "", 0, True),
        (1, None, 8, False),
        (4, "2", 1, False),  # srun --gpu-bind: one of four for each task
        (4, "2", 0, True),
        (2, "0,-1", 1, True),  # local_step, of a machine with one
    ],
)
def test_who_asked_for_gpus_has_them_or_does_not_begin(monkeypatch, asked, visible, found, lacks):
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if not lacks:
        gpus.check(asked, found, "torch")
        return
    said = f"on node {socket.gethostname()} {asked} GPUs are asked for, and torch finds {found};"
    with pytest.raises(ConfigError, match=re.escape(said)) as error:
        gpus.check(asked, found, "torch")
    assert error.value.is_final


def test_a_rank_and_engines_that_lack_gpus_do_not_compute(cards, tmp_path):
    cards(0)
    threads = torch.get_num_threads()
    assert own_device(0, asked=0) == torch.device("cpu")
    torch.set_num_threads(threads)
    with pytest.raises(ConfigError, match=r"4 GPUs are asked for, and torch \S+ finds 0"):
        own_device(0, asked=4)
    with pytest.raises(ConfigError, match="4 GPUs are asked for"):
        server.serve(tmp_path, "127.0.0.1", {"num_threads": threads, "gpus": 4})
    for kind in ("embedded", "sglang"):
        with pytest.raises(ConfigError, match="4 GPUs are asked for, and the driver finds 0"):
            start_engine(
                EngineSpec(kind, tmp_path),
                host="127.0.0.1", token="t", log_path=tmp_path / "log", least_gpus=4,
            )  # fmt: skip


def test_a_task_is_told_how_many_gpus_were_asked_for(monkeypatch):
    monkeypatch.setattr("sys.argv", ["entry", "/run", "rollout", "--start", "1", "--gpus", "4"])
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "local")
    monkeypatch.setenv("SUBMITIT_LOCAL_JOB_ID", "7")
    assert entry._context(entry._parse()).gpus == 4


def test_a_gpu_that_this_machine_lacks_has_a_name_that_is_nowhere(monkeypatch):
    assert local_step._gpus(2, 2) == ["2", "3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7,6")
    assert local_step._gpus(0, 2) == ["5", "7"]
    assert local_step._gpus(2, 2) == ["6", "-1"]
    assert local_step._gpus(4, 2) == ["-1", "-1"]
    assert local_step._gpus(4, 0) == []


def test_all_components_of_a_run_without_slurm_have_their_gpus_on_this_machine(cards):
    cards(3)
    rollout, actor = (
        Component(name, 2, Resources(gpus_per_node=2), section=section)
        for name, section in (("rollout", "engines.rollout"), ("actor", None))
    )
    with pytest.raises(
        ConfigError,
        match=r"engines.rollout.resources.gpus_per_node = 2, actor.resources.gpus_per_node = 2: "
        "4 GPUs of this machine, .* it shows 3; ask for fewer",
    ):
        preflight.check_gpus([rollout, actor])
    preflight.check_gpus([rollout, dataclasses.replace(actor, on="rollout")])
    cards(0)
    preflight.check_gpus([Component("actor", 2, Resources())])


def test_a_run_that_asks_for_gpus_is_not_started_on_a_machine_without(refused, remarked, cards):
    cards(0)
    for told, verb in ((remarked, "check"), (refused, "submit")):
        said = told(verb, "job.toml", "--local", "--set", "resources.gpus_per_node=4")
        assert "8 GPUs of this machine, where the run is to be, and it shows 0; ask for" in said


def test_the_driver_is_asked_and_one_that_is_not_there_shows_none(monkeypatch):
    class Driver:
        def __init__(self, fails):
            self.fails = fails

        def cuInit(self, _):  # noqa: N802
            return 999 if self.fails else 0

        def cuDeviceGetCount(self, there):  # noqa: N802
            there._obj.value = 4
            return 0

    for fails, found in ((False, 4), (True, 0)):
        monkeypatch.setattr(gpus.ctypes, "CDLL", lambda _, fails=fails: Driver(fails))
        assert gpus.count() == found

    def nowhere(_):
        raise OSError

    monkeypatch.setattr(gpus.ctypes, "CDLL", nowhere)
    assert gpus.count() == 0
