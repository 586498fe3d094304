"""Describes the shape of a model, whatever its family, and declares families: the file of a new one
makes one `Family`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from relax_hpc.config.hf_config import ConfigJson
from relax_hpc.trainer.models.names import Parameter
from relax_hpc.trainer.models.rope import Rope


@dataclass(frozen=True, slots=True)
class MoeArchitecture:
    """The shape of the layers of a mixture of experts."""

    num_experts: int
    experts_per_token: int
    ffn_hidden_size: int
    norm_topk_prob: bool
    """Whether the weights of a token's experts add up to 1; else those of the other experts are
    missing."""
    layers: tuple[int, ...]
    """Numbers of the layers with experts, from 0; the others are dense."""


@dataclass(frozen=True, slots=True)
class VisionArchitecture:
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    patch: int
    time: int
    merge: int
    """Patches per side of a token."""
    positions: int
    """Learned positions per side, resampled to the grid of each frame."""
    rope_base: float
    out_size: int
    """Channels of a feature: the hidden size of the language model."""
    taps: tuple[int, ...]
    """Layers whose outputs become further features, from 0: the first is added after the first
    layer of the language model, and so on."""

    @property
    def patch_values(self) -> int:
        return 3 * self.time * self.patch**2

    @property
    def levels(self) -> int:
        """Features of a token."""
        return 1 + len(self.taps)


@dataclass(frozen=True, slots=True)
class AudioArchitecture:
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    bins: int
    channels: int
    chunks: int
    """Chunks of mel frames per attention window; see `windows_of`."""
    out_size: int
    """Channels of a feature: the hidden size of the language model."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """The shape of a model, from its config.json."""

    model_type: str
    """Name of the family, a key of `registry.FAMILIES`."""
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    """Tokens of the longest text."""
    norm_epsilon: float
    rope: Rope
    tied_embeddings: bool
    experts: MoeArchitecture | None = None
    vision: VisionArchitecture | None = None
    audio: AudioArchitecture | None = None
    is_window: bool = False
    """Whether longer texts would have tokens that do not see all before them."""
    names_class: bool = field(default=True, compare=False)
    """Whether config.json has `architectures`, which SGLang needs."""

    @property
    def said_positions(self) -> str:
        """`max_positions`, for messages."""
        if self.is_window:
            return f"a sliding window of {self.max_positions} (config.json: sliding_window)"
        return f"{self.max_positions} positions"


CHUNK = 100
"""Mel frames of a chunk."""
CHUNK_TOKENS = 13
"""Tokens of a whole chunk: `tokens_of(CHUNK)`."""


class SoundWindow(NamedTuple):
    frames: int
    room: int
    """Frames to which each of its chunks is zero-padded: `CHUNK`, or the sound's length if shorter.
    The convolutions see the padding after the last frame."""

    @property
    def tokens(self) -> int:
        whole, rest = divmod(self.frames, CHUNK)
        return whole * CHUNK_TOKENS + tokens_of(rest)


def tokens_of(frames: int) -> int:
    """Returns the tokens of a chunk, or of a part of one; the convolutions halve it three times."""
    for _ in range(3):
        frames = (frames + 1) // 2
    return frames


def windows_of(frames: int, chunks: int) -> list[SoundWindow]:
    """Cuts a sound.

    Args:
        frames: of its mel spectrum, at least 1.
    """
    size, room = chunks * CHUNK, min(frames, CHUNK)
    return [SoundWindow(min(size, frames - begin), room) for begin in range(0, frames, size)]


@dataclass(frozen=True, slots=True)
class Family:
    model_type: str
    causal: str
    """The class of transformers that engine and trainer implement; `architectures` may name it."""
    read: Callable[[ConfigJson], Architecture]
    """Raises a ConfigError for settings that the trainer would compute differently from the model.
    """
    transformer: Callable[[Architecture], dict[str, Any]]
    """Fields of Megatron-core's TransformerConfig that the model determines."""
    parameters: Callable[[Architecture], Iterator[Parameter]]
    """The model's parameters, in order of export; layers by their number in the model."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Fields that the job may override."""
    fuses_experts: bool = False
    """Whether the hub's folders have all experts of a layer in one tensor, `Parameter.fused`."""
    kept: tuple[str, ...] = ()
    """Prefixes of a folder's tensors outside the trained parts: exports copy them."""
