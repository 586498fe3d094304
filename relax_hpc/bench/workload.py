"""The data that the benchmarks move: a text batch and an image batch, the same everywhere."""

from collections.abc import Callable
from typing import Literal

import numpy as np

from relax_hpc.bus.shards.routed import COLUMN as EXPERTS
from relax_hpc.schema import (
    OFFSETS,
    Columns,
    FinishReason,
    MediaKind,
    Medium,
    PromptGroup,
    Trajectory,
)

Kind = Literal["text", "images"]
NUM_GROUPS, SIBLINGS, MEAN_TOKENS, MAX_TOKENS = 128, 8, 4000, 8192
NUM_IMAGES, IMAGE_BYTES = 256, 1 << 20
VOCABULARY = 150_000
ROUTED_TOKENS = 8192


def text_groups() -> list[PromptGroup]:
    """1,024 ragged trajectories in groups of 8, up to 8k tokens."""
    rng = np.random.default_rng(0)
    return [
        PromptGroup(guid, [_trajectory(rng, guid, sibling) for sibling in range(SIBLINGS)])
        for guid in range(NUM_GROUPS)
    ]


def short_groups(count: int) -> list[PromptGroup]:
    """Groups of 8 trajectories of 48 tokens: for what does not depend on bytes."""
    rng = np.random.default_rng(3)
    return [
        PromptGroup(guid, [_trajectory(rng, guid, sibling, 48) for sibling in range(SIBLINGS)])
        for guid in range(count)
    ]


def image_groups() -> list[PromptGroup]:
    """256 trajectories of a few tokens, each with an image of its own of about 1 MiB."""
    rng = np.random.default_rng(1)
    groups = []
    for guid in range(NUM_IMAGES):
        size = int(IMAGE_BYTES * (0.85 + 0.3 * rng.random()))
        data = np.frombuffer(rng.bytes(size), np.uint8).copy()  # does not compress, like JPEG
        row = _trajectory(rng, guid, 0, size=64)
        image = Medium(MediaKind.JPEG, data, (1, 74, 74))
        groups.append(PromptGroup(guid, [row._replace(media=(image,))]))
    return groups


def routed_columns() -> Columns:
    """Draws the 8 of 128 experts that a router with favourites chose in 48 layers, for 8,192
    tokens."""
    rng, layers, experts, chosen, tokens = np.random.default_rng(2), 48, 128, 8, ROUTED_TOKENS
    routed = np.empty((tokens, layers, chosen), np.int16)
    for layer in range(layers):
        scores = rng.normal(size=experts) + rng.gumbel(size=(tokens, experts))
        routed[:, layer] = np.argpartition(-scores, chosen, axis=1)[:, :chosen]
    offsets = np.array([0, tokens], np.int64)
    values = routed.reshape(tokens, layers * chosen)
    sibling = np.zeros(1, np.int32)
    return {
        OFFSETS["token"]: offsets,
        OFFSETS["routed"]: offsets,
        "row/sibling": sibling,
        "row/segment": sibling,
        EXPERTS: values,
    }


GROUPS: dict[Kind, Callable[[], list[PromptGroup]]] = {"text": text_groups, "images": image_groups}


def renumbered(groups: list[PromptGroup], first_guid: int) -> list[PromptGroup]:
    """The same data as further prompts of a run."""
    return [
        PromptGroup(guid, [t._replace(guid=guid) for t in group.trajectories])
        for guid, group in enumerate(groups, first_guid)
    ]


def _trajectory(
    rng: np.random.Generator, guid: int, sibling: int, size: int | None = None
) -> Trajectory:
    if size is None:
        size = int(np.clip(rng.lognormal(np.log(MEAN_TOKENS) - 0.2, 0.6), 64, MAX_TOKENS))
    return Trajectory(
        guid=guid,
        sibling=sibling,
        prompt_index=guid,
        seed=sibling,
        token_ids=rng.integers(0, VOCABULARY, size, dtype=np.int32),
        prompt_len=32,
        loss_mask=(np.arange(size) >= 32).astype(np.uint8),
        columns={"rollout_logprobs": -rng.random(size, dtype=np.float32)},
        version_runs=np.array([[32, 0]], dtype=np.int32),
        finish=FinishReason.STOP,
        reward=1.0,
    )
