"""Runs the actor of supervised fine-tuning: documents in, a model out, without engines."""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from relax_hpc.algorithms.composition import Objective, cross_entropy
from relax_hpc.config.model import MegatronConfig
from relax_hpc.config.run import SftRunConfig
from relax_hpc.data import order
from relax_hpc.data import tokenizer as tokenizers
from relax_hpc.data.documents import Document, Documents
from relax_hpc.errors import ConfigError
from relax_hpc.roles.dealing.micro_batches import MicroBatches, deal_rows, imbalance, own_rows
from relax_hpc.roles.ending import Ending, LastSave
from relax_hpc.roles.role import ModelRank
from relax_hpc.roles.sft import document_check
from relax_hpc.roles.training.build import RankStart, tell_parameters, trainer_of
from relax_hpc.roles.training.duties import Duties, StepRecord, note_skipped, stop_or_go_on
from relax_hpc.runtime.comm.world import World
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.telemetry.events import EventWriter
from relax_hpc.runtime.telemetry.timers import Timers
from relax_hpc.schema import Row
from relax_hpc.trainer.checkpoints import saving
from relax_hpc.trainer.models import hf_folder
from relax_hpc.trainer.training_engine import ScoringEngine, SkippedUpdate, TrainingEngine

log = logging.getLogger(__name__)


class RankBatch(NamedTuple):
    rows: Sequence[Row]
    micro_batches: MicroBatches


class HeldoutLoss(NamedTuple):
    """Mean negative log-likelihood of the held-out documents' trained tokens, nats."""

    loss: float
    num_tokens: int


class SftDuties(Duties[list[RankBatch]]):
    """A rank's work besides training; a task is the share of every data-parallel rank."""

    def heldout(self) -> list[RankBatch] | None:
        """Returns the held-out share of every data-parallel rank, as rank 0 decides."""
        return None

    def note_heldout(self, step: int, heldout: HeldoutLoss) -> None: ...

    def export(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Iterates to the end: gathering needs every rank."""
        for _ in tensors:
            pass


def run(
    config: SftRunConfig,
    world: World,
    trainer: TrainingEngine,
    duties: SftDuties,
    save: Callable[[], None],
    stop: Callable[[], None],
) -> None:
    """Trains until `num_steps`, and exports the model; rank 0 reads and deals out.

    Args:
        save: called after every step; saves if a save is due.
        stop: called before every step; saves and waits if the job is about to end.
    """
    objective = Objective(cross_entropy, reads_old=False)
    heldout: RankBatch = world.bcast(duties.heldout())[trainer.dp_rank]
    if trainer.step == 0:
        _measure(world, trainer, heldout, duties)
    while trainer.step < config.num_steps:
        stop()
        step = trainer.step + 1
        timers = Timers(step)
        last = step == config.num_steps
        with timers("read"):
            share: RankBatch = world.bcast(duties.next_task(step, timers))[trainer.dp_rank]
        with timers.phase("train"):
            trainer.accumulate(share.rows, share.micro_batches, objective, last=True)
            stats = trainer.update()
        stop_or_go_on(duties, step, trainer.skip)
        if last or _is_due(step, config.sft.heldout_every):
            with timers("heldout"):
                _measure(world, trainer, heldout, duties)
        with timers("save"):
            save()
        duties.end_step(step, stats | trainer.costs, timers)
    duties.export(trainer.stream_weights())


def heldout_loss(world: World, trainer: ScoringEngine, share: RankBatch) -> HeldoutLoss:
    """Measures the loss of the documents in all ranks' shares; the same on every rank."""
    found = trainer.forward_logprobs(share.rows, share.micro_batches)
    mine = {}
    for row, logprobs in zip(share.rows, found, strict=True):
        mask = row.loss_mask[1:] != 0
        mine[row.guid] = (-float(logprobs[1:][mask].sum(dtype=np.float64)), int(mask.sum()))
    # Ranks of a replica hold the same documents: by name, each counts once.
    every = {guid: part for rank in world.allgather(mine) for guid, part in rank.items()}
    num_tokens = sum(count for _, count in every.values())
    return HeldoutLoss(math.fsum(nll for nll, _ in every.values()) / num_tokens, num_tokens)


def _measure(world: World, trainer: TrainingEngine, share: RankBatch, duties: SftDuties) -> None:
    if not share.rows and not share.micro_batches:
        return  # on no rank: there are no held-out documents
    duties.note_heldout(trainer.step, heldout_loss(world, trainer, share))


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def main(rank: ModelRank[SftRunConfig]) -> None:
    """Resumes from the newest checkpoint, if any, and trains to the end."""
    config, paths, world, events = rank.config, rank.paths, rank.world, rank.events
    files, tokenizer = document_check.open_files(config), tokenizers.load(config.model.path)
    # A rank looks at what no other does, so together they see all.
    document_check.check_share(config, files, tokenizer, world.rank, world.size)
    start = RankStart(rank)
    trainer = start.build(partial(trainer_of, config, world))
    checkpoints = saving.checkpoints_of(
        config.actor, paths, world, DataPosition, timeout_s=config.launch.advanced.peer_timeout_s
    )
    resumed = start.resume(checkpoints, trainer)
    rank0 = None
    if world.rank == 0:
        start.log_phases()
        tell_parameters(config, events)
        train, *heldout = (Documents(each.path, tokenizer, config.sft, each.rows) for each in files)
        measured = _choose_heldout(config, heldout)
        position = resumed.position if resumed else None
        rank0 = SftRank0(config, paths, train, measured, events, position)
    save = start.save(config.actor, trainer, checkpoints, rank0)
    save.make_up()
    ending = Ending(paths, rank.context.attempt) if rank0 else None
    stop = LastSave(world, trainer, save, ending, rank.context.end)
    run(config, world, trainer, rank0 or SftDuties(), save, stop)
    stop.close()
    if rank0:
        events.emit("end")
    start.end()


def _choose_heldout(config: SftRunConfig, heldout: Sequence[Documents]) -> list[Document]:
    return [
        source.document(line)
        for source in heldout
        for line in range(min(config.sft.heldout_documents, len(source)))
    ]


class DataPosition(NamedTuple):
    """The position of a checkpoint in the documents."""

    epoch: int
    place: int
    """Documents of this epoch before it."""
    num_documents: int
    """Documents in the file, which must not change."""
    order: int = 1
    """`data.order.VERSION` at the checkpoint."""

    @property
    def fence(self) -> int:
        """Constant: passes only ever follow each other."""
        return self.epoch


class SftRank0(SftDuties):
    """Documents of a run, and its record."""

    def __init__(
        self,
        config: SftRunConfig,
        paths: RunPaths,
        documents: Documents,
        heldout: Sequence[Document],
        events: EventWriter,
        position: DataPosition | None,
    ) -> None:
        """Continues from `position`, or starts with the first document.

        Raises:
            ConfigError: the number or order of documents has changed since the checkpoint.
        """
        count = len(documents)
        if position and position.num_documents != count:
            raise ConfigError(
                f"sft.train = {config.sft.train}: has {count} documents, the checkpoint was made "
                f"with {position.num_documents}; restore the file, or submit a new run"
            )
        if position and position.order != order.VERSION and config.sft.shuffle_seed is not None:
            raise ConfigError(
                f"sft.train: the checkpoint was made in order {position.order} of the documents, "
                f"this relax-hpc has order {order.VERSION}; go on with the version that began the "
                "run, or submit a new run"
            )
        self._config, self._paths, self._events = config, paths, events
        self._documents, self._heldout = documents, heldout
        self._ordinal = position.epoch * count + position.place if position else 0
        self._reader = ThreadPoolExecutor(1)  # tokenizes the next batch while one is trained on
        self._ahead = self._reader.submit(documents.batch, self._ordinal)
        self._batch: dict[str, float] = {}
        self._record = StepRecord(events, config.num_steps)

    @property
    def position(self) -> DataPosition:
        count = len(self._documents)
        return DataPosition(*divmod(self._ordinal, count), count, order.VERSION)

    def check_fenced(self) -> None:
        """Does nothing: there is one trainer, and nothing to take over."""

    def release(self) -> None:
        """Does nothing: documents stay where they are."""

    def next_task(self, step: int, timers: Timers) -> list[RankBatch]:
        batch = self._ahead.result()
        self._ordinal = batch.end
        self._ahead = self._reader.submit(self._documents.batch, batch.end)
        # Of a truncated document there may be nothing left to train on.
        trained = [document for document in batch.documents if document.num_trained]
        shares = deal(self._config.actor, trained)
        self._batch = {
            "data/epoch": batch.end / len(self._documents),
            "data/truncated": sum(document.is_truncated for document in batch.documents),
            "data/left_out": len(batch.documents) - len(trained),
            "num_documents": len(trained),
            "num_tokens": sum(len(document.token_ids) for document in trained),
            "num_trained_tokens": sum(document.num_trained for document in trained),
            "batch/micro_batches": len(shares[0].micro_batches),
            "batch/imbalance": imbalance([_num_tokens(share) for share in shares]),
        }
        return shares

    def heldout(self) -> list[RankBatch]:
        return deal(self._config.actor, self._heldout)

    def note_heldout(self, step: int, heldout: HeldoutLoss) -> None:
        self._events.emit("heldout", step=step, **heldout._asdict())
        log.info("held-out, step %d: loss %.4f", step, heldout.loss)

    def end_step(self, step: int, fields: dict[str, Any], timers: Timers) -> None:
        if not self._batch["num_trained_tokens"]:
            log.warning("step %d: no document has a token to train on: no update", step)
            fields = {name: value for name, value in fields.items() if name != "loss"}
        self._record.end_step(step, {**self._batch, **fields}, timers)

    def note_skipped(self, step: int, skip: SkippedUpdate) -> None:
        """Logs the documents that prevented the update; `guid` is their line."""
        note_skipped(self._events, step, skip, {})

    def export(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        folder = self._paths.exported_model
        hf_folder.write(folder, tensors, self._config.model.path)
        self._events.emit("export", path=str(folder))
        log.info("the model is in %s", folder)


def deal(config: MegatronConfig, documents: Sequence[Document]) -> list[RankBatch]:
    """Packs documents into micro-batches, a share for every data-parallel rank."""
    lengths = np.array([len(document.token_ids) for document in documents], np.int64)
    shares = []
    for micro_batches in deal_rows(config, lengths, np.arange(len(documents))):
        own = own_rows(micro_batches)
        shares.append(RankBatch([documents[row] for row in own.rows], own.micro_batches))
    return shares


def _num_tokens(share: RankBatch) -> int:
    return sum(len(row.token_ids) for row in share.rows)
