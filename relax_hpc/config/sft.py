"""Supervised fine-tuning: the job that has a section [sft], and neither rollout nor bus."""

from typing import Literal, Self

from pydantic import model_validator

from relax_hpc.config.run import JobConfig
from relax_hpc.sections import NonNegative, Positive, Section, UserPath


class SftConfig(Section):
    train: UserPath
    """Documents: JSON lines or Parquet, each with `messages`, or `prompt` and `completion`. A file,
    folder, pattern or slice, as a name in `prompts.train`."""
    heldout: UserPath | None = None
    """Documents nothing is trained on; their loss is measured before, during and after."""
    batch_size: Positive | None = None
    """Documents of a step; give this or `tokens_per_step`."""
    tokens_per_step: Positive | None = None
    """A step takes documents, in their order, until the next one would exceed it."""
    num_steps: Positive | None = None
    """Batches to train on; training ends here or after `epochs`, whichever is first."""
    epochs: Positive | None = None
    """Passes over the documents; the last batch of the last one may be smaller."""
    shuffle_seed: NonNegative | None = 0
    """Order of the documents, drawn anew each epoch; unset keeps the file's order."""
    chat_template: bool = True
    """Render prompt and completion as a turn each of the tokenizer's chat template; `messages`
    always are rendered."""
    max_tokens: Positive = 4096
    """Tokens of a document; `too_long` says what becomes of a longer one."""
    too_long: Literal["error", "truncate"] = "error"
    """error: refused before the job starts. truncate: its first `max_tokens` are kept, and
    counted; if none of them is trained on, it is left out."""
    heldout_every: NonNegative = 20
    """Steps between measurements of the held-out loss; 0 measures before and after only."""
    heldout_documents: Positive = 256
    """Held-out documents used, from the top of the file."""

    @model_validator(mode="after")
    def _says_how_much(self) -> Self:
        if (self.batch_size is None) == (self.tokens_per_step is None):
            raise ValueError("takes either batch_size or tokens_per_step; set one of them")
        if self.num_steps is None and self.epochs is None:
            raise ValueError("needs num_steps or epochs; set one of them")
        return self


class SftRunConfig(JobConfig):
    """Supervised fine-tuning by the actor alone."""

    sft: SftConfig

    @model_validator(mode="after")
    def _is_one_job(self) -> Self:
        if self.launch.layout != "hetjob":
            raise ValueError(
                f"launch.layout = {self.launch.layout!r}: supervised fine-tuning has no rollout to "
                "be apart from; use 'hetjob'"
            )
        return self

    @property
    def num_steps(self) -> int:
        assert self.sft.num_steps is not None, "submit counts the steps of the epochs"
        return self.sft.num_steps

    @property
    def epochs_per_step(self) -> int:
        return 1

    @property
    def temperature(self) -> float:
        return 1.0
