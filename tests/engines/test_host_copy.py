"""Copies for a checkpoint: where they lie, who waits, and what a node has too little of."""

import threading
from types import SimpleNamespace

import psutil
import pytest
import torch

from relax_hpc.errors import CheckpointError
from relax_hpc.trainer.megatron import host_memory
from relax_hpc.trainer.megatron.host_memory import HostCopy


def tensors():
    torch.manual_seed(0)
    return [torch.randn(300), torch.randn(4, 50).t(), torch.zeros(0, 3), torch.ones(()).double()]


def test_copies_are_of_the_moment_and_each_is_in_one_block(monkeypatch):
    monkeypatch.setattr(host_memory, "_BLOCK", 1024)
    host, made = HostCopy(), tensors()
    host.reserve(made)
    copies, wait = host.of(made)
    assert host.finish() >= 0.0
    for tensor in made:
        tensor.add_(1)
    wait()
    for copy, expected in zip(copies, tensors(), strict=True):
        assert torch.equal(copy, expected) and copy.is_contiguous()
    # 1,200 bytes are more than a block; 800, rounded up to 832, have room for 8 behind them.
    assert host_memory._block_sizes([1200, 800, 0, 8]) == [1200, 840]
    assert [len(block) for block in host._blocks] == [1200, 840]


def test_what_changes_the_tensors_waits_for_the_copy_and_the_save_does_not(monkeypatch):
    go, real = threading.Event(), host_memory._copy
    monkeypatch.setattr(host_memory, "_copy", lambda *args: go.wait(20) and real(*args))
    host, (tensor,) = HostCopy(), [torch.ones(3)]
    (copy,), _ = host.of([tensor])  # returns though nothing is copied
    later = threading.Thread(target=lambda: (host.finish(), tensor.zero_()))
    later.start()
    later.join(0.1)
    assert later.is_alive() and tensor.all()
    go.set()
    later.join(20)
    assert copy.all() and not tensor.any()


def test_a_copy_that_fails_is_told_to_those_who_would_write_it(monkeypatch):
    def fail(*_):
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(host_memory, "_copy", fail)
    host = HostCopy()
    _, wait = host.of([torch.ones(3)])
    host.finish()
    with pytest.raises(RuntimeError, match="illegal"):
        wait()


def test_a_twentieth_of_a_large_node_is_left_to_others(monkeypatch):
    node = SimpleNamespace(total=400 << 30, available=50 << 30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: node)
    monkeypatch.setattr(host_memory, "_read_memory_left", lambda own: [33 << 30])
    host_memory.check_room(30 << 30, of=1)
    with pytest.raises(CheckpointError, match=r"50.0 GiB are free, of which 20 are left"):
        host_memory.check_room((30 << 30) + 1, of=1)
    monkeypatch.setattr(host_memory, "_read_memory_left", lambda own: [31 << 30])
    with pytest.raises(CheckpointError, match=r"31.0 GiB are free, of which 2 are left"):
        host_memory.check_room((29 << 30) + 1, of=1)


def test_the_limit_of_the_job_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(host_memory, "_CGROUPS", tmp_path)
    step = tmp_path / "job" / "step"
    step.mkdir(parents=True)
    (step / "memory.max").write_text("max\n")
    job = {"max": 10 << 30, "current": 8 << 30, "stat": f"anon 5\ninactive_file {1 << 30}"}
    for name, value in job.items():
        (tmp_path / "job" / f"memory.{name}").write_text(f"{value}\n")
    own = tmp_path / "cgroup"
    own.write_text("0::/job/step\n")
    assert list(host_memory._read_memory_left(own)) == [3 << 30]
    host_memory.check_room(1 << 30, of=1, own=own)
    with pytest.raises(CheckpointError, match=r"3.0 GiB are free"):
        host_memory.check_room((1 << 30) + 1, of=5 << 30, own=own)
    assert list(host_memory._read_memory_left(tmp_path / "nowhere")) == []
