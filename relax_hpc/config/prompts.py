"""Configures the prompts of a run: data, templates, media."""

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

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
    UserPath,
)


def _check_order(pair: tuple[int, int]) -> tuple[int, int]:
    if pair[0] > pair[1]:
        raise ValueError(f"the first is the smaller one; write [{pair[1]}, {pair[0]}]")
    return pair


Bounds = Annotated[tuple[Positive, Positive], AfterValidator(_check_order)]


Store = Literal["source", "canonical", "smaller"]


class MediaAdvanced(Section):
    store: Store = "source"
    """Form of media on the bus. source: the bytes of their files, which the trainer decodes again
    and compares. canonical: the pixels or the spectrum themselves, about ten times the bytes of
    a photo, for nodes with different decoders. smaller: whichever is smaller, for videos of
    which few pixels are shown: decoding 10 s of 720p takes 0.4 s of a core."""
    workers: Positive | None = None
    """Processes of a rollout task, and of `submit`, that read and decode media. Unset is one per
    core, at most 8."""
    folder: UserPath | None = None
    """Base folder of media paths, which they may not leave, not even by links. Unset is the folder
    of the data file, without this limit."""
    broken: Literal["error", "skip"] = "error"
    """Handling of rows with an unusable medium. error: the job is refused, or ends where the medium
    is decoded. skip: all media are decoded when the job is submitted, and the row is left out
    from the start, and listed in left_out.jsonl. One that breaks later ends the job."""
    audio_max_s: Annotated[Number, Field(gt=0, le=86400)] | None = None
    """Longest sound, in seconds; a longer one cannot be used."""
    audio_in_video: bool = False
    """Whether an audio model also gets the sound of a video, interleaved with its frames by time.
    Silent videos are allowed."""


class MediaConfig(Section):
    """Unset bounds are those of the model's own preprocessor."""

    image_tokens: Bounds | None = None
    """Fewest and most tokens of an image, e.g. [64, 1024]: it is resized to fit."""
    video_fps: Annotated[Number, Field(gt=0, le=1000)] | None = None
    """Frames per second taken from a video; for a list of frames, its rate."""
    video_frames: Bounds | None = None
    """Fewest and most frames of a video; one with fewer cannot be used."""
    video_tokens_per_frame: Bounds | None = None
    """Fewest and most tokens per frame of a video; two frames share their tokens."""
    advanced: MediaAdvanced = MediaAdvanced()


TAKEN = frozenset({
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation",
    "max_length", "messages", "padding", "return_assistant_tokens_mask", "return_dict",
    "return_tensors", "tokenize", "tokenizer_kwargs", "tools", "truncation",
})  # fmt: skip
"""Template arguments that we set ourselves, or that are none."""


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
    """Field with the answer for the reward; text."""
    tools: _Name = "tools"
    """Field with the tools of the prompt, in the form that chat templates take; optional in a
    row."""
    source: _Name = "source"
    """Field with the row's data set; optional in a row."""
    images: _Name = "images"
    """Field with the images of the prompt, in the order of their places: a list, or one. Each is a
    path, {bytes}, a data: URL or file.tar:name:offset:size. Optional in a row."""
    videos: _Name = "videos"
    """Field with the videos, named as images are, or as lists of frames. Optional in a row."""
    audios: _Name = "audios"
    """Field with the sounds, named as images are. Optional in a row."""


def with_columns(sets: Any, columns: Any) -> Any:  # noqa: ANN401
    """Gives each set of a parsed job the default column names.

    Args:
        sets: tables by name, as parsed; invalid ones are left for the fields' own checks.
        columns: names of the whole job, likewise.
    """
    if not isinstance(sets, dict) or not isinstance(columns, dict):
        return sets
    known = {  # a mistake is said once, where it stands
        key: name
        for key, name in columns.items()
        if key in Columns.model_fields and isinstance(name, str) and name
    }

    def fill(each: Any) -> Any:  # noqa: ANN401
        own = each.get("columns", {}) if isinstance(each, dict) else None
        return each | {"columns": known | own} if isinstance(own, dict) else each

    return {name: fill(each) for name, each in sets.items()}


class SourceConfig(Section):
    """One of several sources of prompts."""

    path: Data
    """Data, named as in `prompts.train`."""
    weight: Annotated[Number, Field(gt=0)] = 1.0
    """Share of the prompts, relative to the other weights. Exact in every 1,000 prompts."""
    columns: Columns = Columns()
    """Names of its fields, as in `prompts.columns`, which has the defaults."""


class PromptsConfig(Section):
    train: MaybeData = []
    """Data with a prompt (text or chat messages) and an answer per row: a file of JSON lines or
    Parquet, a folder, a pattern, a program ("file.py:Class"), `hf:owner/name:config/split`, or a
    list of them. Each may end in a slice, as in "train.jsonl[100:]". Set this or `sources`."""
    sources: dict[Annotated[str, Field(pattern=NAME, max_length=100)], SourceConfig] = {}
    """Named sources, mixed by weight; each has its own epochs."""
    chat_template: bool = True
    """Render prompts with the tokenizer's chat template."""
    template_args: Annotated[PassThrough, AfterValidator(_untaken)] = {}
    """Arguments for the chat template, e.g. {enable_thinking = false}. The field `template_args` of
    a row, an object, overrides them."""
    system: str = ""
    """System message for prompts that have none."""
    user: Annotated[str, AfterValidator(_with_prompt)] = "{prompt}"
    """Text that replaces a prompt, or its last user message; {prompt} stands for the original."""
    assistant_prefix: str = ""
    r"""Beginning of every answer of the policy, e.g. "<think>\n". It belongs to the prompt: it is
    not sampled, not trained on, and not part of the response."""
    max_prompt_tokens: Positive = 1024
    """Most tokens of a prompt; a longer one cannot be used."""
    bad_rows: Literal["error", "skip"] = "error"
    """Handling of rows that are malformed, empty or too long. error: the job is refused, or ends
    before anything is sampled. skip: the row is left out from the start, and listed in
    left_out.jsonl."""
    curriculum: str = ""
    """Numeric field of a row for a curriculum: each epoch begins with the tenth of the rows where
    it is smallest, and ends with the largest. Within a tenth the order is shuffled."""
    retire_after: NonNegative = 0
    """Stop sampling a row after this many prompt groups that all siblings solved; 0 is never. Needs
    `algorithm.groups.name = "refill"`."""
    columns: Columns = Columns()
    media: MediaConfig = MediaConfig()

    @property
    def mixture(self) -> dict[str, SourceConfig]:
        """Returns the sources by name; `train` has none."""
        return self.sources or {"": SourceConfig(path=self.train, columns=self.columns)}

    @property
    def may_leave_out(self) -> bool:
        return "skip" in (self.bad_rows, self.media.advanced.broken)

    def leaves_out(self, error: ConfigError) -> bool:
        """Whether a row with this error is left out."""
        is_medium = isinstance(error, MediumError)
        return (self.media.advanced.broken if is_medium else self.bad_rows) == "skip"

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
