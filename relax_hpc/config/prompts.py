"""Prompts of a run: where they are, and what a row of data becomes."""

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from relax_hpc.config.media import MediaConfig
from relax_hpc.errors import ConfigError, MediumError
from relax_hpc.sections import (
    NAME,
    Data,
    MaybeData,
    NonNegative,
    Number,
    PassThrough,
    Positive,
    Section,
)

TAKEN = frozenset({
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation",
    "max_length", "messages", "padding", "return_assistant_tokens_mask", "return_dict",
    "return_tensors", "tokenize", "tokenizer_kwargs", "tools", "truncation",
})  # fmt: skip
"""Arguments of a chat template that are said by us, or are none."""


def _with_prompt(text: str) -> str:
    if "{prompt}" not in text:
        raise ValueError("leaves the prompt out; write {prompt} where it is to stand")
    return text


def _untaken(args: dict[str, Any]) -> dict[str, Any]:
    if taken := sorted(TAKEN & args.keys()):
        raise ValueError(f"{taken[0]} is said by the run itself; remove it")
    return args


_Name = Annotated[str, Field(min_length=1)]


class Columns(Section):
    """Names of the fields of a row; "reward_model.ground_truth" is a field within another."""

    prompt: _Name = "prompt"
    """Field with the prompt: text or chat messages. A dot leads into an object, as in
    "extra.question"."""
    answer: _Name = "answer"
    """Field with the answer that the reward compares with; text."""
    tools: _Name = "tools"
    """Field with the tools of the prompt, in the form that chat templates take; a row may lack it.
    """
    source: _Name = "source"
    """Field with the name of the data set that a row is from; a row may lack it."""
    images: _Name = "images"
    """Field with the images of the prompt, in the order of their places: a list, or one. Each is a
    path, {bytes}, a data: URL or file.tar:name:offset:size. A row may lack it."""
    videos: _Name = "videos"
    """Field with the videos, named as images are, or as lists of frames. A row may lack it."""
    audios: _Name = "audios"
    """Field with the sounds, named as images are. A row may lack it."""


def with_columns(sets: Any, columns: Any) -> Any:  # noqa: ANN401
    """Gives each set of a parsed job the names of columns that it does not say itself.

    Args:
        sets: tables by name, as parsed; what is none is left for the fields' own checks.
        columns: names of the whole job, likewise.
    """
    if not isinstance(sets, dict) or not isinstance(columns, dict):
        return sets
    known = {  # a mistake is said once, where it stands
        key: name
        for key, name in columns.items()
        if key in Columns.model_fields and isinstance(name, str) and name
    }

    def filled(each: Any) -> Any:  # noqa: ANN401
        own = each.get("columns", {}) if isinstance(each, dict) else None
        return each | {"columns": known | own} if isinstance(own, dict) else each

    return {name: filled(each) for name, each in sets.items()}


class SourceConfig(Section):
    """One of several sources of prompts."""

    path: Data
    """Names of the data, as in `prompts.train`."""
    weight: Annotated[Number, Field(gt=0)] = 1.0
    """Part of the prompts, beside the weights of the others. Exact in every 1,000 prompts."""
    columns: Columns = Columns()
    """Names of its fields, by the keys of `prompts.columns`, whose names it has where it says none.
    """


class PromptsConfig(Section):
    train: MaybeData = []
    """Data with a prompt (text or chat messages) and an answer a row: a file of JSON lines or
    Parquet, a folder, a pattern, a program ("file.py:Class"), `hf:owner/name:config/split`, or a
    list of them. Behind each a slice may stand, as in "train.jsonl[100:]". Give this or
    `sources`."""
    sources: dict[Annotated[str, Field(pattern=NAME, max_length=100)], SourceConfig] = {}
    """Sources by name that are mixed by weight; each runs through epochs of its own."""
    chat_template: bool = True
    """Render prompts with the tokenizer's chat template."""
    template_args: Annotated[PassThrough, AfterValidator(_untaken)] = {}
    """Arguments for the chat template, e.g. {enable_thinking = false}. The field `template_args` of
    a row, an object, goes before them."""
    system: str = ""
    """Text of a system message that is put in front of prompts that have none."""
    user: Annotated[str, AfterValidator(_with_prompt)] = "{prompt}"
    """Text that is asked in place of a prompt, or of the last user message of one; {prompt} in it
    is that text."""
    assistant_prefix: str = ""
    """Text with which every answer of the policy begins, e.g. "<think>\\n". It belongs to the
    prompt: it is not sampled, not trained on, and no part of the response."""
    max_prompt_tokens: Positive = 1024
    """A longer prompt cannot be used."""
    bad_rows: Literal["error", "skip"] = "error"
    """Fate of a row that is malformed, empty or too long. error: the job is refused, or ends before
    anything is sampled. skip: the row is left out from the start, and listed in left_out.jsonl."""
    curriculum: str = ""
    """Field of a row, a number: each epoch begins with the tenth of the rows where it is smallest,
    and ends with that where it is largest. Within these the order is shuffled."""
    retire_after: NonNegative = 0
    """Prompt groups of a row that are solved by all siblings before it is not sampled any more; 0
    never. Needs `algorithm.groups.name = "refill"`."""
    columns: Columns = Columns()
    media: MediaConfig = MediaConfig()

    @property
    def mixture(self) -> dict[str, SourceConfig]:
        """The sources by name; that of `train` has none."""
        return self.sources or {"": SourceConfig(path=self.train, columns=self.columns)}

    @property
    def may_leave_out(self) -> bool:
        """Whether any row may be left out."""
        return "skip" in (self.bad_rows, self.media.broken)

    def leaves_out(self, error: ConfigError) -> bool:
        """Whether a row that cannot be used for this reason is left out."""
        is_medium = isinstance(error, MediumError)
        return (self.media.broken if is_medium else self.bad_rows) == "skip"

    @model_validator(mode="before")
    @classmethod
    def _sources_have_columns(cls, given: Any) -> Any:  # noqa: ANN401
        if not isinstance(given, dict) or "sources" not in given:
            return given
        return given | {"sources": with_columns(given["sources"], given.get("columns"))}

    @model_validator(mode="after")
    def _data_is_named_once(self) -> Self:
        if bool(self.train) == bool(self.sources):
            raise ValueError("needs train or sources, and not both; name the data in one of them")
        return self

    @model_validator(mode="after")
    def _messages_are_rendered(self) -> Self:
        needs = {"system": self.system, "template_args": self.template_args}
        if named := [name for name, value in needs.items() if value and not self.chat_template]:
            raise ValueError(
                f"{named[0]} needs chat_template = true; use `user` for text around plain "
                "prompts, or remove it"
            )
        return self
