"""Ranks that stay alive over many cases: one process each, told what to run through a pipe."""

import gc
import importlib
import multiprocessing
import traceback
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait

_CONTEXT = multiprocessing.get_context("forkserver")
_DEADLINE_S = 120
_LEFT_ALONE_S = 5
"""Time that ranks may still take when another has failed, which they may wait for."""


class Ranks:
    """`size` processes with gloo among them, started by the first `call`."""

    def __init__(self, size):
        self.size = size
        self.processes, self._pipes = [], []

    def __getattr__(self, name):
        """A function of `worker` or `checkpoint_worker`, to be run on all of them."""
        if name.startswith("_"):
            raise AttributeError(name)
        return partial(self._run, "worker checkpoint_worker", name)

    def call(self, function, **kwargs):
        """Runs a function of another module."""
        return self._run(function.__module__, function.__name__, **kwargs)

    def _run(self, modules, name, /, **kwargs):
        """Runs a function of these modules on all of them; what it returned, rank by rank.

        A rank that fails, fails the test in its own words. Others who then do not answer are
        ended, and the next call starts new ones.
        """
        if not self.processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((modules, name, kwargs))
        answers, failures = self._answers()
        dead = [process for process in self.processes if not process.is_alive()]
        if dead or len(answers) + len(failures) < self.size:
            self.close()
        missing = sorted({*range(self.size)} - {*answers, *failures})
        said = [f"rank {rank}:\n{failures[rank]}" for rank in sorted(failures)]
        said += [f"rank {rank} did not answer" for rank in missing]
        assert not said, "\n".join(said)
        return [answers[rank] for rank in range(self.size)]

    def _answers(self):
        """Returns what ranks returned and why others failed, by rank; silent ones are missing."""
        answers, failures = {}, {}
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        while waiting:
            ready = wait(list(waiting), _LEFT_ALONE_S if failures else _DEADLINE_S)
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    ok, value = pipe.recv()
                except EOFError:
                    ok, value = False, "its process ended"
                (answers if ok else failures)[rank] = value
            if not ready:
                break
        return answers, failures

    def _start(self):
        # Ranks are forked from a server that has imported this once: seconds for each of them. It
        # is the process's only one: said at import, it would be what the last test file said.
        _CONTEXT.set_forkserver_preload(["relax_hpc.trainer.megatron.trainer"])
        ends = [_CONTEXT.Pipe() for _ in range(self.size)]
        self._pipes = [mine for mine, _ in ends]
        self.processes = [
            _CONTEXT.Process(target=_serve, args=(rank, self.size, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(ends)
        ]
        for process, (_, theirs) in zip(self.processes, ends, strict=True):
            process.start()
            theirs.close()
        assert self._pipes[0].poll(_DEADLINE_S), "rank 0 did not start"
        port = self._pipes[0].recv()
        for pipe in self._pipes[1:]:
            pipe.send(port)

    def close(self):
        """Ends them, whatever they do; there is nothing that they would have to leave in order."""
        for process in self.processes:
            process.kill()
        for process, pipe in zip(self.processes, self._pipes, strict=True):
            process.join()
            pipe.close()
        self.processes, self._pipes = [], []


class Pools(dict):
    """Ranks by their number."""

    def __missing__(self, size):
        self[size] = Ranks(size)
        return self[size]

    def close(self):
        for pool in self.values():
            pool.close()


def _share_one_device():
    """Makes groups of one device: with a device each, dozens of threads poll while nothing runs."""
    from torch.distributed import distributed_c10d

    gloo = distributed_c10d.ProcessGroupGloo
    device = gloo.create_device(hostname="127.0.0.1")

    class OnOneDevice(gloo):
        def __init__(self, store, rank, size, timeout):
            options = gloo._Options()
            options._devices, options._timeout = [device], timeout
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = OnOneDevice


def _function(modules, name):
    found = (getattr(importlib.import_module(each), name, None) for each in modules.split())
    return next(filter(None, found))


def _serve(rank, size, pipe: Connection):
    import torch
    import torch.distributed as dist

    gc.freeze()  # what was imported stays: groups that are left can be collected in no time
    torch.set_num_threads(1)
    _share_one_device()
    timeout = timedelta(seconds=_DEADLINE_S)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, size, True, timeout, wait_for_workers=False)
        pipe.send(store.port)
    else:
        store = dist.TCPStore("127.0.0.1", pipe.recv(), size, False, timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    while True:
        try:
            modules, name, kwargs = pipe.recv()
        except EOFError:  # the tests are over, however they ended
            return
        try:
            pipe.send((True, _function(modules, name)(**kwargs)))
        except BaseException:  # noqa: BLE001 - outermost frame: the test process reports it
            pipe.send((False, traceback.format_exc()))
