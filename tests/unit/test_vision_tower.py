"""The tower that sees gives the features and the gradients of Hugging Face's, in all families."""

import pytest
import torch

from relax_hpc.trainer.models import qwen3_omni_moe, qwen3_vl
from relax_hpc.trainer.models.architecture import Architecture, VisionArchitecture
from relax_hpc.trainer.models.rope import Rope
from relax_hpc.trainer.models.towers import Frame, Places, VisionTower

SHAPE = VisionArchitecture(
    num_layers=3, hidden_size=48, ffn_hidden_size=80, num_heads=2, patch=4, time=2, merge=2,
    positions=6, rope_base=10000.0, out_size=40, taps=(0, 2),
)  # fmt: skip
GRIDS = {"an image": [(1, 4, 6)], "all of it": [(1, 6, 2), (3, 4, 8), (1, 4, 8), (1, 14, 2)]}
CPU = torch.device("cpu")


def theirs(shape, kind="vl"):
    from transformers import Qwen3VLVisionConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    if kind == "omni":
        from transformers import Qwen3OmniMoeVisionEncoderConfig as Qwen3VLVisionConfig
        from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
            Qwen3OmniMoeVisionEncoder as Qwen3VLVisionModel,
        )

    torch.manual_seed(0)
    config = Qwen3VLVisionConfig(
        depth=shape.num_layers, hidden_size=shape.hidden_size, num_heads=shape.num_heads,
        intermediate_size=shape.ffn_hidden_size, patch_size=shape.patch, in_channels=3,
        temporal_patch_size=shape.time, spatial_merge_size=shape.merge,
        num_position_embeddings=shape.positions**2, out_hidden_size=shape.out_size,
        deepstack_visual_indexes=list(shape.taps),
    )  # fmt: skip
    model = Qwen3VLVisionModel(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.1)
            if ("norm" in name or "ln_q" in name) and name.endswith("weight"):
                parameter.add_(1)
    return model


def frames_of(grids):
    return [Frame(height, width) for time, height, width in grids for _ in range(time)]


def names_of(kind):
    """Name in the folder, without its prefix -> name and shape in our tower, of every tensor."""
    kind, table, prefix = {
        "vl": ("qwen3_vl", qwen3_vl.tower, "model.visual."),
        "omni": ("qwen3_omni_moe", qwen3_omni_moe.seeing, "thinker.visual."),
    }[kind]
    found, rope = {}, Rope("default", 1e4)
    model = Architecture(kind, 2, 40, 80, 2, 2, 20, 64, 64, 1e-6, rope, False, vision=SHAPE)
    for parameter in table(model):
        [(name, shape)], (core,) = parameter.hf.items(), parameter.core
        assert name.startswith(prefix)
        found[name.removeprefix(prefix)] = core.removeprefix("vision."), shape
    return found


def both(grids, kind="vl", **options):
    """(features, gradients by name) of Hugging Face's tower and of ours, same weights."""
    other = theirs(SHAPE, kind)
    own, names = VisionTower(SHAPE), names_of(kind)
    own.load_state_dict({names[name][0]: each for name, each in other.state_dict().items()})
    count = sum(frame.patches for frame in frames_of(grids))
    torch.manual_seed(1)
    patches = torch.randn(count, SHAPE.patch_values)
    given = [torch.randn(count // 4, SHAPE.out_size) for _ in range(SHAPE.levels)]
    out = other(patches, grid_thw=torch.tensor(grids))
    expected = [out.pooler_output, *out.deepstack_features]
    found = own(patches, Places.of(frames_of(grids), SHAPE, CPU), **options)
    answers = []
    for model, features in ((other, expected), (own, found)):
        torch.autograd.backward(features, given)
        named = {n: p.grad for n, p in model.named_parameters()}
        if model is other:
            named = {names[name][0]: gradient for name, gradient in named.items()}
        answers.append((features, named))
    return answers


@pytest.mark.parametrize(("kind", "recompute"), [("vl", False), ("vl", True), ("omni", False)])
@pytest.mark.parametrize("grids", GRIDS.values(), ids=GRIDS)
def test_features_and_gradients_are_hugging_faces(grids, kind, recompute):
    (expected, their_gradients), (found, gradients) = both(grids, kind, recompute=recompute)
    assert len(found) == len(expected) == SHAPE.levels
    for mine, other in zip(found, expected, strict=True):
        assert (mine - other).abs().max() < 2e-6 * other.abs().max()
    assert gradients.keys() == their_gradients.keys()
    for name, other in their_gradients.items():
        assert (gradients[name] - other).abs().max() < 2e-6 * other.abs().max(), name
        assert other.abs().max() > 0, name


def test_a_frame_is_seen_alone_whatever_lies_beside_it():
    """Frames of two sizes, in turns, equal each by itself; no patch looks into another frame."""
    torch.manual_seed(3)
    own, frames = VisionTower(SHAPE), [Frame(4, 4), Frame(2, 6), Frame(4, 4), Frame(4, 4)]
    patches = torch.randn(60, SHAPE.patch_values)
    together = own(patches, Places.of(frames, SHAPE, CPU))
    begin = 0
    for frame in frames:
        end = begin + frame.patches
        alone = own(patches[begin:end], Places.of([frame], SHAPE, CPU))
        for all_of_it, mine in zip(together, alone, strict=True):
            assert (all_of_it[begin // 4 : end // 4] - mine).abs().max() < 1e-6
        begin = end
