"""Where tasks begin: which role is built, with which world, and what is said when it fails."""

import logging
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
from role_fakes import Events, Journal, config

from relax_hpc.config.run import SftRunConfig
from relax_hpc.errors import ConfigError, EngineError
from relax_hpc.roles import table
from relax_hpc.roles import task as main
from relax_hpc.roles.actor import build as actor_task
from relax_hpc.roles.context import TaskContext
from relax_hpc.roles.role import ModelRank
from relax_hpc.roles.rollout import build as rollout_task
from relax_hpc.roles.scorer import build as logprobs_task
from relax_hpc.roles.sft import loop as sft_task
from relax_hpc.roles.sft.document_check import DocumentFile
from relax_hpc.roles.sft.loop import DataPosition
from relax_hpc.roles.training import build as training
from relax_hpc.roles.training.duties import Duties
from relax_hpc.runtime import kernel_cache
from relax_hpc.runtime.files.run_secret import RunSecret
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.telemetry.events import read_events

SFT = SftRunConfig.model_validate({
    "name": "run", "model": {"path": "unused"},
    "sft": {"train": "t", "heldout": "h", "heldout_documents": 3, "num_steps": 3, "batch_size": 2},
})  # fmt: skip


def context(role="actor", rank=2, start=3):
    return TaskContext(role, rank, 4, 1, attempt="7.0", start=start, node="n2")


@pytest.fixture
def joined(monkeypatch, tmp_path):
    """The world of a component's ranks; they do not touch Megatron."""
    asked = []

    def connect(bootstrap, **how):
        asked.append((bootstrap, how))
        return SimpleNamespace(size=how["size"])

    RunSecret.create(RunPaths(tmp_path).secret)
    monkeypatch.setattr(main, "connect", connect)
    monkeypatch.setattr("relax_hpc.trainer.megatron.cpu.install", lambda: None)
    return asked


@pytest.mark.parametrize(("role", "module"), [("actor", actor_task), ("reference", logprobs_task)])
def test_ranks_join_in_a_place_of_their_start_and_outlast_rank_0(
    tmp_path, monkeypatch, joined, role, module
):
    given = []
    monkeypatch.setattr(module, "main", lambda *args: given.append(args))
    paths, events = RunPaths(tmp_path), Events()
    settings = config(launch__advanced__peer_timeout_s=77, reference__placement="own")
    declared = table.role_of(settings, role)
    main.start(declared, settings, paths, context(role), "files", events)
    [(bootstrap, how)] = joined
    assert (bootstrap, how.pop("rendezvous")) == ("files", paths.rendezvous(f"{role}-7.0-3"))
    assert how.pop("secret").derive("x") == RunSecret.read(paths.secret).derive("x")
    assert how == {"role": role, "rank": 2, "size": 4, "timeout_s": 137}
    assert [e["size"] for e in events.of("world")] == [4]
    [(rank, *scoring)] = given
    assert scoring == [logprobs_task.of_reference(settings)] * (role == "reference")
    assert (rank.config, rank.paths, rank.world.size) == (settings, paths, 4)
    assert (rank.context, rank.events) == (context(role), events)


def test_a_fine_tuning_has_an_actor_of_its_own(tmp_path, monkeypatch, joined):
    given = []
    monkeypatch.setattr(sft_task, "main", lambda *args: given.append(args))
    declared = table.role_of(SFT, "actor")
    main.start(declared, SFT, RunPaths(tmp_path), context(), "mpi", Events())
    [(rank,)] = given
    assert rank.config is SFT and rank.context == context()


@pytest.mark.parametrize(("bootstrap", "joins"), [("files", 0), ("mpi", 1)])
def test_rollout_tasks_work_alone_and_join_only_where_they_were_started_by_mpi(
    tmp_path, monkeypatch, joined, bootstrap, joins
):
    given = []
    monkeypatch.setattr(rollout_task, "main", lambda *args: given.append(args))
    declared, paths = table.role_of(config(), "rollout"), RunPaths(tmp_path)
    main.start(declared, config(), paths, context("rollout"), bootstrap, Events())
    assert len(joined) == joins and len(given) == 1


def test_what_a_role_raises_is_noted_and_raised(tmp_path, monkeypatch):
    def fails(*_):
        raise EngineError("no memory")

    paths = RunPaths(tmp_path)
    monkeypatch.setattr(main, "read_resolved", lambda path: config())
    monkeypatch.setattr(main.logs, "setup", lambda *_: None)
    monkeypatch.setattr(main, "start", fails)
    logging.getLogger("relax_hpc").setLevel(logging.CRITICAL)
    try:
        with pytest.raises(EngineError):
            main.run(paths.root, context(), "files")
    finally:
        logging.getLogger("relax_hpc").setLevel(logging.NOTSET)
    start, error = read_events(paths.root / "events")
    assert (start["event"], start["attempt"], start["start"]) == ("start", "7.0", 3)
    assert (start["role"], start["rank"], start["node"]) == ("actor", 2, "n2")
    assert (error["event"], error["message"]) == ("error", "EngineError: no memory")


def test_a_role_begins_with_kernels_where_the_job_says(tmp_path, monkeypatch):
    paths, kernels, seen = RunPaths(tmp_path / "run"), tmp_path / "kernels", []
    settings = config(launch__advanced__kernel_cache=str(kernels))
    monkeypatch.setattr(os, "environ", {k: v for k, v in os.environ.items() if "TRITON" not in k})
    monkeypatch.setattr(main, "read_resolved", lambda path: settings)
    monkeypatch.setattr(main.logs, "setup", lambda *_: None)
    monkeypatch.setattr(main, "start", lambda *_: seen.append(os.environ["TRITON_CACHE_DIR"]))
    main.run(paths.root, context(), "files")
    assert seen == [f"{kernel_cache.folder_of(kernels)}/triton"]
    kernels.chmod(0o777)
    with pytest.raises(ConfigError, match="kernel_cache"):
        main.run(paths.root, context(), "files")
    said = read_events(paths.root / "events")[-1]["message"]
    assert len(seen) == 1 and "others may write" in said


class World:
    size = 2

    def __init__(self, rank, journal):
        self.rank, self.journal = rank, journal

    def barrier(self):
        self.journal.note("barrier")


def fake(monkeypatch, module, journal, *names, **values):
    """Things of a module that note what they are called with, and are what they are given."""
    for name in names:
        made = values.get(name, name)

        def call(*args, _name=name, _made=made, **kwargs):
            journal.note(_name, args, kwargs)
            return _made

        monkeypatch.setattr(module, name, call)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_of_the_reference_scores_with_its_own_model_and_rank_0_writes(
    tmp_path, monkeypatch, rank
):
    journal, paths = Journal(), RunPaths(tmp_path)
    closing = SimpleNamespace(close=lambda: journal.note("closed"))
    fake(
        monkeypatch, logprobs_task, journal, "MegatronScorer", "Reader", "CreditTail",
        "ScorerRank0", Reader=closing, ScorerRank0=closing,
    )  # fmt: skip
    fake(monkeypatch, training, journal, "SidecarWriter", "init_torch")
    fake(monkeypatch, logprobs_task.loop, journal, "run")
    monkeypatch.setattr(training.torch.distributed, "destroy_process_group", lambda: None)
    settings = config(
        reference__placement="own", reference__path="its model", reference__layout__data_parallel=2,
        bus__advanced__compress=["ragged/token_ids"],
    )  # fmt: skip
    at = World(rank, journal), context("reference", rank), Events()
    logprobs_task.main(ModelRank(settings, paths, *at), logprobs_task.of_reference(settings))
    [(_, (model, megatron, *_), _)] = journal.of("MegatronScorer")
    assert str(model.path) == "its model" and megatron.layout.data_parallel == 2
    [(_, (_, _, _, duties, _, _), _)] = journal.of("run")
    assert type(duties) is Duties if rank else duties is closing
    assert len(journal.of("closed")) == 2 - rank and journal[-1] == ("barrier",)
    if rank == 0:
        [(_, (bus, name, provenance), how)] = journal.of("SidecarWriter")
        assert (bus, name, provenance["model"]) == (paths.bus, "reference-0", "its model")
        assert how == {"compress": ["ragged/token_ids"]}
        [(_, (found, column, *_), _)] = journal.of("ScorerRank0")
        assert (found.layout.data_parallel, column) == (2, "ragged/ref_logprobs")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_fine_tuning_goes_on_from_its_checkpoint_and_rank_0_reads(tmp_path, monkeypatch, rank):
    journal, paths, events = Journal(), RunPaths(tmp_path), Events()
    made = SimpleNamespace(make_up=lambda: journal.note("made up"))
    resumed, rank0 = SimpleNamespace(position=DataPosition(1, 2, 3)), SimpleNamespace(position="at")
    last_save = SimpleNamespace(close=lambda: journal.note("last save closed"))
    fake(
        monkeypatch, sft_task, journal, "trainer_of", "SftRank0", "tell_parameters", "LastSave",
        "run", SftRank0=rank0, LastSave=last_save,
    )  # fmt: skip
    fake(monkeypatch, training, journal, "init_torch", "Saving", Saving=made)
    monkeypatch.setattr(sft_task.tokenizers, "load", lambda path: "tokenizer")

    class Documents:
        def __init__(self, path, tokenizer, sft, rows):
            assert rows == f"rows of {path}"
            self.path = str(path)

        def __len__(self):
            return 2 if self.path == "h" else 10

        def document(self, line):
            return f"{self.path} {line}"

    monkeypatch.setattr(sft_task, "Documents", Documents)
    files = [DocumentFile(key, key[0], f"rows of {key[0]}") for key in ("train", "heldout")]
    monkeypatch.setattr(sft_task.document_check, "open_files", lambda config: files)
    fake(monkeypatch, sft_task.document_check, journal, "check_share")
    fake(monkeypatch, sft_task.saving, journal, "checkpoints_of", "resume", resume=resumed)
    monkeypatch.setattr(training.torch.distributed, "destroy_process_group", lambda: None)
    task = replace(context(), end="the time limit")
    sft_task.main(ModelRank(SFT, paths, World(rank, journal), task, events))
    [(_, (*_, saves, _), _)] = journal.of("Saving")
    [(_, (_, _, _, duties, save, stop), _)] = journal.of("run")
    assert (save, stop) == (made, last_save)
    assert len(journal.of("last save closed")) == len(journal.of("made up")) == 1
    [(_, (_, _, _, ending, end), _)] = journal.of("LastSave")
    assert (ending is None, end) == (rank != 0, "the time limit")
    if rank:
        assert type(duties) is sft_task.SftDuties and saves is None and not events.all
        return
    assert duties is saves is rank0 and events.of("end") == [{}]
    [(_, (_, _, documents, heldout, _, position), _)] = journal.of("SftRank0")
    assert (documents.path, heldout) == ("t", ["h 0", "h 1"])  # of three that were asked for
    assert position == DataPosition(1, 2, 3)
