"""Builds an actor rank for supervised fine-tuning, and does the work of its rank 0.

Rank 0 reads and deals documents, keeps the record, and exports the model.
"""

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from relax_hpc.config.model import MegatronConfig
from relax_hpc.config.run import SftRunConfig
from relax_hpc.data import order
from relax_hpc.data import tokenizer as tokenizers
from relax_hpc.data.documents import Document, Documents
from relax_hpc.errors import ConfigError
from relax_hpc.roles.dealing.micro_batches import deal_rows, imbalance, own_rows
from relax_hpc.roles.ending import Ending, LastSave
from relax_hpc.roles.role import ModelRank
from relax_hpc.roles.sft import document_check, loop
from relax_hpc.roles.sft.loop import HeldoutLoss, RankBatch
from relax_hpc.roles.training.build import RankStart, tell_parameters, trainer_of
from relax_hpc.roles.training.duties import StepRecord, note_skipped
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.telemetry.events import EventWriter
from relax_hpc.runtime.telemetry.timers import Timers
from relax_hpc.trainer.checkpoints import saving
from relax_hpc.trainer.models import hf_folder
from relax_hpc.trainer.training_engine import SkippedUpdate

log = logging.getLogger(__name__)


def main(rank: ModelRank[SftRunConfig]) -> None:
    """Resumes from the newest checkpoint, if any, and trains to the end."""
    config, paths, world, events = rank.config, rank.paths, rank.world, rank.events
    files, tokenizer = document_check.open_files(config), tokenizers.load(config.model.path)
    # A rank looks at what no other does, so together they see all.
    document_check.check_share(config, files, tokenizer, world.rank, world.size)
    start = RankStart(rank)
    trainer = start.build(partial(trainer_of, config, world))
    checkpoints = saving.checkpoints_of(
        config.actor, paths, world, DataPosition, timeout_s=config.launch.peer_timeout_s
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
    loop.run(config, world, trainer, rank0 or loop.SftDuties(), save, stop)
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


class SftRank0(loop.SftDuties):
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
