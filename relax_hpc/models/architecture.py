"""The shape of a model, whatever its family."""

from dataclasses import dataclass, field

from relax_hpc.models.rotary.rope import Rope


@dataclass(frozen=True, slots=True)
class Experts:
    """The shape of the layers of a mixture of experts."""

    num_experts: int
    experts_per_token: int
    ffn_hidden_size: int
    """Width of one expert."""
    norm_topk_prob: bool
    """A token's experts share a weight of 1; else the weight of the others is missing from it."""
    layers: tuple[int, ...]
    """Numbers of the layers that have experts, from 0; the others are dense."""


@dataclass(frozen=True, slots=True)
class Vision:
    """The shape of a tower that sees."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    patch: int
    """Pixels of a side of a patch."""
    time: int
    """Frames of a patch."""
    merge: int
    """Patches of a side of a token."""
    positions: int
    """Learned positions of a side; they are resampled to the grid of each frame."""
    rope_base: float
    out_size: int
    """Channels of a feature: the hidden size of the language model."""
    taps: tuple[int, ...]
    """Layers whose outputs become further features, from 0: the first of them is added after the
    first layer of the language model, and so on."""

    @property
    def patch_values(self) -> int:
        """Values of a patch."""
        return 3 * self.time * self.patch**2

    @property
    def levels(self) -> int:
        """Features of a token."""
        return 1 + len(self.taps)


@dataclass(frozen=True, slots=True)
class Audio:
    """The shape of a tower that hears."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    bins: int
    """Mel bins of a frame."""
    channels: int
    """Channels of the convolutions."""
    chunks: int
    """Chunks of mel frames that are attended to together; see `models.audio.windows`."""
    out_size: int
    """Channels of a feature: the hidden size of the language model."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """The model's shape, by its config.json."""

    model_type: str
    """Name of the family, a key of `models.registry.FAMILIES`."""
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    """Width of a dense layer."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    """Tokens of the longest text."""
    norm_epsilon: float
    rope: Rope
    tied_embeddings: bool
    experts: Experts | None = None
    vision: Vision | None = None
    audio: Audio | None = None
    is_window: bool = False
    """Longer texts would have tokens that do not see all before them."""
    names_class: bool = field(default=True, compare=False)
    """Whether config.json has `architectures`: SGLang goes by it."""

    @property
    def said_positions(self) -> str:
        """`max_positions`, for messages."""
        if self.is_window:
            return f"a sliding window of {self.max_positions} (config.json: sliding_window)"
        return f"{self.max_positions} positions"
