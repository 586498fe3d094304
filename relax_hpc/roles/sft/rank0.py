"""The work of rank 0 alone in supervised fine-tuning: read, deal out, keep the record, export."""

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from torch import Tensor

from relax_hpc.config.layout import MegatronConfig
from relax_hpc.config.sft import SftRunConfig
from relax_hpc.engines.training_engine import Skip
from relax_hpc.errors import ConfigError
from relax_hpc.models import hf_folder
from relax_hpc.paths import RunPaths
from relax_hpc.prompts import order
from relax_hpc.prompts.documents import Document, Documents
from relax_hpc.roles.dealing.micro_batches import imbalance, own_rows, plan_micro_batches
from relax_hpc.roles.sft.loop import HeldoutLoss, Share
from relax_hpc.roles.training import skips
from relax_hpc.telemetry.events import EventWriter
from relax_hpc.telemetry.pace import PaceMeter, accounted
from relax_hpc.telemetry.progress import step_line
from relax_hpc.telemetry.timers import Timers

log = logging.getLogger(__name__)


class DataPosition(NamedTuple):
    """The place in the documents that a checkpoint has come to."""

    epoch: int
    place: int
    """Documents of this epoch that are behind it."""
    num_documents: int
    """Documents in the file, which must stay as it is."""
    order: int = 1
    """`prompts.order.VERSION` at the checkpoint."""

    @property
    def fence(self) -> int:
        """Passes only ever follow each other."""
        return self.epoch


class Rank0:
    """The documents of a run, and the record of what became of them: its `Duties`."""

    def __init__(
        self,
        config: SftRunConfig,
        paths: RunPaths,
        documents: Documents,
        heldout: Sequence[Document],
        events: EventWriter,
        position: DataPosition | None,
    ) -> None:
        """Goes on from `position`, or from the first document.

        Raises:
            ConfigError: the file has another number of documents than at the checkpoint, or they
                would be in another order.
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
        self._pace = PaceMeter()

    @property
    def position(self) -> DataPosition:
        count = len(self._documents)
        return DataPosition(*divmod(self._ordinal, count), count, order.VERSION)

    def check_fenced(self) -> None:
        """There is one trainer, and nothing that another one could take over."""

    def release(self) -> None:
        """Documents stay where they are."""

    def next_batch(self) -> list[Share]:
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

    def heldout(self) -> list[Share]:
        return deal(self._config.actor, self._heldout)

    def measured(self, step: int, heldout: HeldoutLoss) -> None:
        self._events.emit("heldout", step=step, **heldout._asdict())
        log.info("held-out, step %d: loss %.4f", step, heldout.loss)

    def end_step(self, step: int, fields: dict[str, Any], timers: Timers) -> None:
        """Logs the step."""
        if not self._batch["num_trained_tokens"]:
            log.warning("step %d: no document has a token to train on: no update", step)
            fields = {name: value for name, value in fields.items() if name != "loss"}
        fields = {**self._batch, **fields, **timers.seconds}
        fields |= accounted(seconds := timers.elapsed, fields)
        fields["tokens_per_s"] = self._batch["num_tokens"] / seconds
        eta_s = self._pace.end_step(seconds, self._config.num_steps - step)
        self._events.emit("step", step=step, eta_s=eta_s, **fields)
        self._events.emit("phases", step=step, phases=timers.phases)
        log.info("%s", step_line({"step": step, **fields}, self._config.num_steps, eta_s))

    def skipped(self, step: int, skip: Skip) -> None:
        """Says which documents kept the update from being done; `guid` is their line."""
        self._events.emit("skipped", step=step, **skips.fields_of(skip, {}))
        log.warning("step %d: update skipped: %s", step, skips.line_of(skip, {}))

    def export(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Writes the model as a Hugging Face folder."""
        folder = self._paths.exported_model
        hf_folder.write(folder, tensors, self._config.model.path)
        self._events.emit("export", path=str(folder))
        log.info("the model is in %s", folder)


def deal(config: MegatronConfig, documents: Sequence[Document]) -> list[Share]:
    """Packs documents into micro-batches, a share for every data-parallel rank."""
    dealt = plan_micro_batches(
        [len(document.token_ids) for document in documents],
        num_ranks=config.layout.data_parallel,
        budget=config.tokens_per_micro_batch,
        count_multiple_of=config.layout.micro_batches_multiple_of,
    )
    shares = []
    for micro_batches in dealt:
        own = own_rows(micro_batches)
        shares.append(Share([documents[row] for row in own.rows], own.micro_batches))
    return shares


def _num_tokens(share: Share) -> int:
    return sum(len(row.token_ids) for row in share.rows)
