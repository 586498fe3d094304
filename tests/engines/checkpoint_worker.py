"""The functions that tests of checkpoints run on ranks of a pool."""

import hashlib
import io
import os
import signal
from pathlib import Path

import torch
from megatron.core import dist_checkpointing, tensor_parallel
from worker import _state, mains, moments

from relax_hpc.bus.plan import PlanPosition
from relax_hpc.errors import RelaxError
from relax_hpc.runtime.comm.world import SoloWorld
from relax_hpc.trainer.checkpoints.store import Checkpoints
from relax_hpc.trainer.megatron import checkpoint_files

CALLS = ("open", "pwrite", "fsync", "mkdir", "rename", "replace", "unlink", "rmdir")


def digest():
    """Digests all that this rank would go on from: weights, optimizer, step, random states."""
    trainer = _state["trainer"]
    state = hashlib.sha256(str(trainer.step).encode())
    for tensor in _tensors(trainer):
        state.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())
    state.update(torch.get_rng_state().numpy())
    return state.hexdigest()


def undecayed():
    """The shapes of this rank's shares of parameters that have no weight decay."""
    groups = _state["trainer"]._optimizer.param_groups
    return [tuple(p.shape) for group in groups if not group["wd_mult"] for p in group["params"]]


def _tensors(trainer):
    for chunk in trainer._chunks:
        yield from filter(torch.is_tensor, chunk.state_dict().values())
    yield from mains()
    for values in moments():
        yield from (values[name] for name in sorted(values))


def draw():
    """The next random numbers, of torch and of every stream that Megatron keeps beside it."""
    tracker = tensor_parallel.get_cuda_rng_tracker()
    found = {"torch": torch.rand(2).tolist()}
    for name in sorted(tracker.get_states()):
        with tracker.fork(name):
            found[name] = torch.rand(2).tolist()
    assert len(found) > 1
    return found


def refusal(folder):
    """Why a checkpoint is not loaded; None if it is."""
    try:
        _state["trainer"].load(folder)
    except RelaxError as error:
        return f"{type(error).__name__}: {error}"
    return None


def read_by_megatron(folder):
    tensors = dist_checkpointing.load_plain_tensors(str(folder))
    return {n: t.float().numpy() for n, t in tensors.items() if torch.is_tensor(t)}


def _checkpoints(root):
    return Checkpoints(root, SoloWorld(), PlanPosition, keep=1)


def save_in_run(root):
    step = _state["trainer"].step
    (saved,) = _checkpoints(root).save(_state["trainer"], PlanPosition(1, step, step))
    assert saved.failure is None


def resume_in_run(root):
    """(step, digest) that the run goes on from."""
    resumed = _checkpoints(root).resume(_state["trainer"])
    assert resumed.step == resumed.position.step == _state["trainer"].step
    return resumed.step, digest()


def kill_in_save(root, call, half, names):
    """A process of its own saves, and is killed before its `call`th call or half way through it.

    Args:
        names: the file gets what the calls were.
    """
    pid = os.fork()
    if pid == 0:
        try:
            _save_and_die(root, call, half, names)
        finally:
            os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code == (-signal.SIGKILL if call else 0)


def _save_and_die(root, call, half, names):
    checkpoint_files.NUM_THREADS = 1  # calls in an order that repeats
    _die_at(root, call, half, names)
    save_in_run(root)


def _die_at(root, number, half, names):
    """Before the `number`th call that changes a file below `root`, or when half of it is done."""
    made, log = 0, os.open(names, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

    def counted(name, real):
        def call(where, *args, **kwargs):
            nonlocal made
            descriptor = isinstance(where, int)
            path = Path(f"/proc/self/fd/{where}").readlink() if descriptor else where
            reads = name == "open" and args and args[0] in ("r", "rb")
            if not str(path).startswith(str(root)) or reads:
                return real(where, *args, **kwargs)
            made += 1
            os.write(log, f"{name} {path}\n".encode())
            if made == number:
                if half and name == "pwrite":
                    real(where, bytes(args[0])[: len(args[0]) // 2], *args[1:])
                elif half:
                    real(where, *args, **kwargs)
                os.kill(os.getpid(), signal.SIGKILL)
            # Only a power cut would tell what is not flushed.
            return None if name == "fsync" else real(where, *args, **kwargs)

        return call

    for name in CALLS:
        setattr(os, name, counted(name, getattr(os, name)))
    io.open = counted("open", io.open)
