"""The nouns: what a trajectory is, and which role writes which column of it.

A shard holds n trajectories, in whole prompt groups. `COLUMNS`, top to bottom, is the data path,
the write permission and the documentation of the file at once; `docs/reference/bus.md` shows the
file.
"""

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Literal, NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt

ColumnWriter = Literal[
    "rollout", "reference", "critic", "teacher", "teacher_2", "teacher_3", "teacher_4",
    "teacher_5", "teacher_6", "teacher_7", "teacher_8",
]  # fmt: skip
"""A writer of columns: one writes the rows, the others add to them."""
COLUMN_WRITERS: dict[ColumnWriter, int] = {
    "rollout": 0,
    "reference": 3,
    "critic": 5,
    "teacher": 8,
    "teacher_2": 9,
    "teacher_3": 10,
    "teacher_4": 11,
    "teacher_5": 12,
    "teacher_6": 13,
    "teacher_7": 14,
    "teacher_8": 15,
}
"""Numbers of writers in the records of a log. Each is given once; 1, 2, 4, 6 and 7 have been."""

TEACHERS: tuple[ColumnWriter, ...] = tuple(
    role for role in COLUMN_WRITERS if role.startswith("teacher")
)
"""Writers of the teachers' columns: a run has one for each of its teachers, in their order."""
PRODUCER: ColumnWriter = "rollout"
"""Writes the rows that the others widen."""

Array = npt.NDArray[np.generic]
Columns = dict[str, Array]
"""Column name -> flat array; ragged columns go with the offsets named in `COLUMNS`."""
ColumnPieces = Mapping[str, Array | Sequence[Array]]
"""Columns to be written; a sequence is a column in pieces, which will lie end to end."""

Axis = Literal[
    "row", "token", "run", "turn", "routed",
    "medium", "media_byte", "media_frame", "media_ref", "media_span",
]  # fmt: skip
ROUTED_EXPERTS = "ragged/routed_experts"
NO_EXPERT = -1
"""Expert of a token of which nobody says where it went."""
ANY_WIDTH = -1
"""Second dimension that depends on the model; the same throughout a run."""


class FinishReason(IntEnum):
    """Why a trajectory ended."""

    STOP = 0
    """The model ended its turn."""
    LENGTH = 1
    """`rollout.max_new_tokens` or the end of the context was reached, by any response of it."""
    ABORT = 2
    """Somebody ended it; what there is counts as partial."""
    RETIRED = 3
    """Nobody was asked: the prompt has been solved often enough."""


class TurnKind(IntEnum):
    """The kinds of a stretch of tokens, by who wrote it."""

    GIVEN = 0
    """Text that the policy was asked."""
    SAMPLED = 1
    """Text of the policy."""
    TOOL = 2
    """The environment, after the policy had answered."""


class MediaKind(IntEnum):
    """The encodings of a medium's bytes."""

    JPEG = 0
    PNG = 1
    WEBP = 2
    MP4 = 3
    FLAC = 4
    WAV = 5
    TENSOR = 6
    MP3 = 7
    OGG = 8
    WEBM = 9
    FRAMES = 10
    """Images that are the frames of a video, in a ZIP file."""


class Column(NamedTuple):
    """One array of a shard."""

    dtype: str
    axis: Axis
    """The thing that its first dimension counts; `OFFSETS[axis]` cuts it into rows."""
    writer: ColumnWriter
    meaning: str
    width: int | None = None
    """Second dimension, if there is one; `ANY_WIDTH` takes what it is given."""
    required: bool = True


OFFSETS: dict[Axis, str] = {
    "token": "index/offsets",
    "run": "index/offsets__runs",
    "turn": "index/offsets__turns",
    "routed": "index/offsets__routed",
    "media_ref": "index/offsets__media_ref",
    "media_span": "index/offsets__media_spans",
    "media_byte": "index/offsets__media_bytes",
    "media_frame": "index/offsets__media_frames",
}
"""Dataset with the n+1 row boundaries of a ragged axis (of `MEDIUM_AXES`: m+1, of the media)."""
MEDIUM_AXES: tuple[Axis, ...] = ("media_byte", "media_frame")

# n = trajectories of the shard, N = their tokens packed end to end, m = distinct media.
COLUMNS: dict[str, Column] = {
    # who it is
    "row/guid": Column("int64", "row", "rollout", "prompt ordinal in the run's order of the data"),
    "row/sibling": Column("int32", "row", "rollout", "0..G-1 within the prompt group"),
    "row/segment": Column("int32", "row", "rollout", "0.. among the rows of its episode"),
    "row/prompt_index": Column("int64", "row", "rollout", "prompt of the file, 0-based"),
    "row/seed": Column("int64", "row", "rollout", "sampling seed, H(run, guid, sibling)"),
    "row/environment": Column("int16", "row", "rollout", "which task; 0 where there is one", None),
    # what was sampled
    "row/prompt_len": Column("int32", "row", "rollout", "leading tokens that were given"),
    "row/response_len": Column("int32", "row", "rollout", "tokens after them"),
    "row/finish": Column("uint8", "row", "rollout", "schema.FinishReason"),
    "row/policy_version_min": Column("int32", "row", "rollout", "oldest policy that sampled"),
    "row/policy_version_max": Column("int32", "row", "rollout", "newest policy that sampled"),
    "row/rewards": Column("float32", "row", "rollout", "of the episode, on each of its rows"),
    "row/reward_error": Column("uint8", "row", "rollout", "1 where it failed"),
    "row/score_parts": Column(
        "float32",
        "row",
        "rollout",
        "parts of the reward, which the attribute `score_parts` names "
        "in this order; NaN where a row has no such part",
        ANY_WIDTH,
        False,
    ),
    "ragged/token_ids": Column("int32", "token", "rollout", "prompt, then response"),
    "ragged/loss_mask": Column("uint8", "token", "rollout", "1 on tokens the policy sampled"),
    "ragged/rollout_logprobs": Column(
        "float32", "token", "rollout", "log mu, nats, at sampling time; 0 where not sampled"
    ),
    "ragged/version_runs": Column(
        "int32", "run", "rollout", "(first token of the row, policy version) per run", 2
    ),
    "ragged/turns": Column(
        "int32", "turn", "rollout", "(first token of the row, 0 given | 1 sampled | 2 tool)", 2
    ),
    # which experts a mixture of experts chose, for routing replay; a row whose prompt went the way
    # of the group's first holds only what follows the prompt
    ROUTED_EXPERTS: Column(
        "int16", "routed", "rollout", "expert per layer and slot", ANY_WIDTH, False
    ),
    # what it looked at: encoded bytes, each medium once in a shard
    "ragged/media_bytes": Column("uint8", "media_byte", "rollout", "encoded media", None, False),
    "ragged/media_ref": Column("int32", "media_ref", "rollout", "which media, 0..m-1", None, False),
    "ragged/media_spans": Column(
        "int32",
        "media_span",
        "rollout",
        "(medium of the row, first token of the row, tokens) that stand for features of a medium",
        3,
        False,
    ),
    "ragged/media_frames": Column(
        "int32", "media_frame", "rollout", "frames taken of a video, 0-based", None, False
    ),
    "media/kind": Column("uint8", "medium", "rollout", "schema.MediaKind", None, False),
    "media/grid_thw": Column("int32", "medium", "rollout", "patches in time, y, x", 3, False),
    "media/seconds_per_grid": Column(
        "float32", "medium", "rollout", "from one patch in time to the next; 0 without", None, False
    ),
    "media/xxh3": Column("uint8", "medium", "rollout", "XXH3-128 of the bytes", 16, False),
    "media/canonical_xxh3": Column(
        "uint8",
        "medium",
        "rollout",
        "XXH3-128 of the canonical array that they are decoded to; zeros where nobody knows",
        16,
        False,
    ),
    # what others add, each in a sidecar shard of its own
    "ragged/ref_logprobs": Column("float32", "token", "reference", "log pi_ref, nats"),
    "ragged/values": Column("float32", "token", "critic", "V(s_t)"),
    # of each teacher: those of the rows that it teaches, nan in the others
    **{
        f"ragged/{role.replace('teacher', 'teacher_logprobs')}": Column(
            "float32", "token", role, "log pi of a teacher, nats; nan in rows of another teacher"
        )
        for role in TEACHERS
    },
}


_FIELDS = frozenset(
    name
    for name, column in COLUMNS.items()
    if name in ("ragged/token_ids", "ragged/loss_mask")
    or (column.axis == "row" and column.writer == "rollout")
)


def columns_of(writer: ColumnWriter, *, optional: bool = False) -> dict[str, Column]:
    """The columns that `writer` must (and with `optional`, may) put into its shards."""
    return {k: c for k, c in COLUMNS.items() if c.writer == writer and (c.required or optional)}


def extra_columns(axis: Axis) -> dict[str, str]:
    """Short name -> column, of those of an axis that a row holds in `columns`.

    What every row has is a field of `Trajectory` instead.
    """
    return {
        name.split("/")[1]: name
        for name, column in COLUMNS.items()
        if column.axis == axis and name not in _FIELDS
    }


class Medium(NamedTuple):
    """An image, sound or film as the engine was given it: encoded, not decoded."""

    kind: MediaKind
    data: npt.NDArray[np.uint8]
    """[bytes]; empty where they were not read."""
    grid_thw: tuple[int, int, int] = (0, 0, 0)
    """Patches in time, y and x; zeros where there is no such grid."""
    canonical_xxh3: bytes = b""
    """[16] XXH3-128 of the canonical array (`media.canonical`); empty where nobody knows it."""
    frames: tuple[int, ...] = ()
    """Frames that are taken of a video, 0-based."""
    seconds_per_grid: float = 0.0
    """Seconds from one patch of a video to the next in time, as float32 holds it."""


NO_SPANS = np.empty((0, 3), np.int32)
NO_SPANS.flags.writeable = False


class Row(Protocol):
    """The part of a sequence that training needs: a `Trajectory` has it, and so has a document."""

    @property
    def guid(self) -> int: ...
    @property
    def sibling(self) -> int: ...
    @property
    def token_ids(self) -> npt.NDArray[np.int32]:
        """[tokens]"""
        ...

    @property
    def loss_mask(self) -> npt.NDArray[np.uint8]:
        """[tokens], 1 on those that are trained on."""
        ...

    @property
    def version_runs(self) -> npt.NDArray[np.int32]:
        """[R, 2] (first token of the row, policy version); empty if nobody sampled it."""
        ...

    @property
    def columns(self) -> Mapping[str, Array]:
        """Columns by short name: [tokens] or []."""
        ...

    @property
    def routed_experts(self) -> npt.NDArray[np.int16] | None:
        """[tokens, layers x experts per token], where they are to be replayed."""
        ...

    @property
    def media(self) -> tuple[Medium, ...]: ...
    @property
    def media_spans(self) -> npt.NDArray[np.int32]:
        """[spans, 3], see `Trajectory`; empty for text."""
        ...


def key_of_medium(row: Row, place: int) -> bytes:
    """Identity of a medium of a row: its canonical array's digest, which rows of all groups may
    share; where nobody knows that, of the medium of this group."""
    return row.media[place].canonical_xxh3 or f"{row.guid}/{place}".encode()


class Trajectory(NamedTuple):
    """One sequence of an episode, as the rollout role finishes it and the trainer reads it."""

    guid: int
    sibling: int
    prompt_index: int
    seed: int
    token_ids: npt.NDArray[np.int32]
    """[prompt_len + response_len]"""
    prompt_len: int
    loss_mask: npt.NDArray[np.uint8]
    version_runs: npt.NDArray[np.int32]
    """[R, 2] (first token of the row, policy version); empty when nothing was sampled."""
    finish: FinishReason
    reward: float
    """Reward of the episode; all of its rows have it."""
    reward_error: bool = False
    """Whether the reward failed; it is 0 then."""
    parts: Mapping[str, float] = {}
    """Parts of the reward by name, where it has several and they were read."""
    columns: Mapping[str, Array] = {}
    """Further columns, by the short names of `COLUMNS`, e.g. rollout_logprobs:
    [tokens] where the column's axis is token, [] where it is row."""
    turns: npt.NDArray[np.int32] | None = None
    """[turns, 2] (first token of the row, TurnKind); None where they were not read."""
    environment: int = 0
    segment: int = 0
    """Place among the rows of the episode: of sibling `sibling` of `guid`."""
    media: tuple[Medium, ...] = ()
    """Media of the prompt, in order; siblings share them, and a shard holds each once."""
    media_spans: npt.NDArray[np.int32] = NO_SPANS
    """[spans, 3] (medium of `media`, first token of the row, tokens), by first token: what stands
    for features of media. Elsewhere a token is text, though it may be a placeholder's."""
    routed_experts: npt.NDArray[np.int16] | None = None
    """[tokens, layers x experts per token]"""

    def with_columns(self, **columns: Array) -> Self:
        """The same with further columns, or others in place of those it has."""
        return self._replace(columns={**self.columns, **columns})

    @property
    def policy_version_min(self) -> int:
        return int(self.version_runs[:, 1].min()) if len(self.version_runs) else -1

    @property
    def policy_version_max(self) -> int:
        return int(self.version_runs[:, 1].max()) if len(self.version_runs) else -1


class PromptGroup(NamedTuple):
    """G episodes of one prompt: what is committed, planned and trained on as a whole."""

    guid: int
    trajectories: list[Trajectory]
    """One or several for each sibling, by (sibling, segment)."""
    metrics: Sequence[Mapping[str, float]] = ()
    """Numbers of the environment for each episode: for the events, not for the bus."""
