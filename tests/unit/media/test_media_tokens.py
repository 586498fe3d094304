"""Token ids and positions of rows with media: those of transformers, of both families."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from media_files import of_transformers, recipe_of, tokenizer

from relax_hpc.data.media.expand import MediaSpan, expand, next_position, positions, with_times
from relax_hpc.data.media.extent import extent_of, interleave
from relax_hpc.data.media.kinds import MediaFacts
from relax_hpc.schema import MediaKind

IMAGE = MediaFacts("image", MediaKind.PNG, 300, 420)
WIDE = MediaFacts("image", MediaKind.PNG, 90, 700)
VIDEO = MediaFacts("video", MediaKind.MP4, 200, 160, 100, 23.976)
SHORT = MediaFacts("video", MediaKind.MP4, 120, 160, 31, 10.0)
SOUND = MediaFacts("audio", MediaKind.WAV, num_samples=37777, sampling_rate=16000)
CASES = {
    "text": [],
    "image": [IMAGE],
    "video": [VIDEO],
    "audio": [SOUND],
    "mixed": [WIDE, VIDEO, SOUND, IMAGE, SHORT],
}
TALL = MediaFacts("video", MediaKind.MP4, 1200, 90, 31, 10.0)
LONG = MediaFacts("audio", MediaKind.MP4, num_samples=441001, sampling_rate=44100)
BRIEF = MediaFacts("audio", MediaKind.MP4, num_samples=7000, sampling_rate=16000)
HEARD = {
    "video and its sound": [(VIDEO, SOUND)],
    "sound that lasts longer": [(SHORT, LONG)],
    "sound that ends before": [(VIDEO, BRIEF)],
    "frames higher than their sound is long": [(TALL, BRIEF)],
    "all of it": [IMAGE, (VIDEO, LONG), SOUND, (SHORT, BRIEF), WIDE, (SHORT, SOUND)],
}
"""Cases with videos that are heard, all of them."""
SETTINGS = {"image_tokens": [4, 60], "video_frames": [2, 12]}


@pytest.fixture(scope="module")
def recipes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    vl = recipe_of(folder, "qwen3_vl", **SETTINGS, video_tokens_per_frame=[2, 20])
    omni = recipe_of(folder, "qwen3_omni_moe", **SETTINGS, video_tokens_per_frame=[2, 20])
    return {"qwen3_vl": vl, "qwen3_omni_moe": omni}


@pytest.fixture(scope="module")
def tokens():
    return tokenizer()


def row(name, case, recipes, tokens):
    recipe = recipes[name]
    extents, parts = [], []
    for number, facts in enumerate((CASES | HEARD)[case]):
        pair = facts if type(facts) is tuple else (facts,)
        if pair[0].modality not in recipe.family.placeholders:
            continue
        made = [extent_of(each, recipe) for each in pair]
        extents += interleave(*made, recipe.positions_per_s) if made[1:] else made
        parts.append(f"part {number}" + recipe.family.wrapped[pair[0].modality])
    text = "<|im_start|>user\n" + "".join(parts) + "what?<|im_end|>\n"
    ids = {recipe.family.placeholders[m]: m for m in recipe.family.placeholders}
    placeholders = {tokens.convert_tokens_to_ids(token): m for token, m in ids.items()}
    written = tokens.encode(with_times(text, extents, recipe.family), add_special_tokens=False)
    return recipe, text, extents, expand(written, extents, placeholders)


def processor(name, recipe, tokens):
    """Transformers' own methods on what they need of a processor."""
    if name == "qwen3_vl":
        from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor as Made
    else:
        from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import (
            Qwen3OmniMoeProcessor as Made,
        )

    made = Made.__new__(Made)
    for modality, token in recipe.family.placeholders.items():
        setattr(made, f"{modality}_token", token)
    made.vision_start_token, made.vision_end_token = "<|vision_start|>", "<|vision_end|>"
    made.audio_bos_token, made.audio_eos_token = "<|audio_start|>", "<|audio_end|>"
    made.image_processor = SimpleNamespace(merge_size=2)
    made.video_processor = SimpleNamespace(merge_size=2, temporal_patch_size=2)
    return made


def ids_of_transformers(name, recipe, text, extents, tokens):
    made = processor(name, recipe, tokens)
    grids = {m: np.array([e.grid for e in extents if e.modality == m]) for m in ("image", "video")}
    videos = [e for e in extents if e.modality == "video"]
    sounds = [e for e in extents if e.modality == "audio"]
    metadata = [SimpleNamespace(frames_indices=list(v.frames), fps=fps_of(v)) for v in videos]
    seen = {"image_grid_thw": grids["image"], "video_grid_thw": grids["video"],
            "video_metadata": metadata,
            "video_second_per_grid": [v.seconds_per_grid for v in videos]}  # fmt: skip
    images = [made.replace_image_token(seen, n) for n in range(len(grids["image"]))]
    heard, counts = [], {}
    if sounds:
        from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import (
            _get_feat_extract_output_lengths,
        )

        lengths = np.array([each.mel_frames for each in sounds])
        counts = {"num_audio_tokens": _get_feat_extract_output_lengths(lengths)}
        alone = [n for n, each in enumerate(sounds) if not each.is_of_video]
        heard = [made.replace_audio_token(counts, n) for n in alone]
    of_videos = [n for n, each in enumerate(sounds) if each.is_of_video]
    given = (counts, of_videos) if of_videos else ()
    options = {"load_audio_from_video": bool(of_videos), "position_id_per_seconds": 13.0}
    films = [made.replace_video_token(seen, n, *given, **options) for n in range(len(videos))]
    written = {"image": images, "video": films, "audio": heard}
    placeholders = {f"{m}_token": t for m, t in recipe.family.placeholders.items()}
    own = SimpleNamespace(all_special_multimodal_tokens=True, **placeholders)
    given = [text], written["image"], written["video"], written["audio"]
    [text], _ = type(made).get_text_with_replacements(own, *given)
    return tokens.encode(text, add_special_tokens=False)


def fps_of(extent):
    return SHORT.fps if extent.frames[-1] < SHORT.num_frames else VIDEO.fps


NAMED = [("qwen3_vl", case) for case in CASES]
NAMED += [("qwen3_omni_moe", case) for case in CASES | HEARD]


@pytest.mark.parametrize(("name", "case"), NAMED)
def test_token_ids_are_those_of_transformers(name, case, recipes, tokens):
    recipe, text, extents, found = row(name, case, recipes, tokens)
    assert found.token_ids == ids_of_transformers(name, recipe, text, extents, tokens)
    assert sum(span.tokens for span in found.spans) == sum(sum(e.tokens) for e in extents)
    for span in found.spans:
        stretch = found.token_ids[span.first : span.first + span.tokens]
        token = recipe.family.placeholders[extents[span.medium].modality]
        assert set(stretch) == {tokens.convert_tokens_to_ids(token)}


def positions_of_transformers(name, recipe, ids, extents, tokens):
    grids = {
        m: torch.tensor([e.grid for e in extents if e.modality == m]) for m in ("image", "video")
    }
    image, video = (g if len(g) else None for g in grids.values())
    here = torch.tensor([ids])
    of = tokens.convert_tokens_to_ids
    if name == "qwen3_vl":
        model = "qwen3_vl/modeling_qwen3_vl"
        vision, index = of_transformers(
            model, "Qwen3VLModel.get_vision_position_ids", "Qwen3VLModel.get_rope_index"
        )
        settings = SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2))
        made = SimpleNamespace(config=settings)
        made.get_vision_position_ids = lambda *a, **k: vision(made, *a, **k)
        kinds = (here == of("<|image_pad|>")).int() + 2 * (here == of("<|video_pad|>")).int()
        return index(made, here, kinds, image, video)
    model = "qwen3_omni_moe/modeling_qwen3_omni_moe"
    base = "Qwen3OmniMoePreTrainedModelForConditionalGeneration"
    vision, index = of_transformers(
        model, f"{base}.get_llm_pos_ids_for_vision", f"{base}.get_rope_index"
    )
    made = SimpleNamespace(spatial_merge_size=2)
    made.config = SimpleNamespace(
        image_token_id=of("<|image_pad|>"), video_token_id=of("<|video_pad|>"),
        audio_token_id=of("<|audio_pad|>"), vision_start_token_id=of("<|vision_start|>"),
        audio_start_token_id=of("<|audio_start|>"), position_id_per_seconds=13,
        audio_config=SimpleNamespace(n_window=50),
    )  # fmt: skip
    made.get_llm_pos_ids_for_vision = lambda *a, **k: vision(made, *a, **k)
    sounds = torch.tensor([e.mel_frames for e in extents if e.modality == "audio"])
    seconds = torch.tensor([e.seconds_per_grid for e in extents if e.modality == "video"])
    hears = any(each.is_of_video for each in extents)
    return index(made, here, image, video, torch.ones_like(here), hears, sounds, seconds)


@pytest.mark.parametrize(("name", "case"), NAMED)
def test_positions_are_those_of_transformers(name, case, recipes, tokens):
    recipe, _, extents, row_ = row(name, case, recipes, tokens)
    ids = row_.token_ids
    found = positions(len(ids), row_.spans, extents, recipe)
    expected, delta = positions_of_transformers(name, recipe, ids, extents, tokens)
    assert found.dtype == np.int64
    assert np.array_equal(found, np.floor(expected[:, 0].numpy()))
    if case != "frames higher than their sound is long":  # there transformers has two answers
        assert next_position(found) == int(delta.squeeze() + len(ids) + 1e-5)
    following = positions_of_transformers(name, recipe, [*ids, 65, 66], extents, tokens)[0]
    assert next_position(found) + 1 == int(following[0, 0, -1])


def test_a_placeholder_that_was_sampled_is_text(recipes, tokens):
    recipe, _, extents, row_ = row("qwen3_vl", "image", recipes, tokens)
    pad = tokens.convert_tokens_to_ids("<|image_pad|>")
    more = [*row_.token_ids, 65, pad, pad, 66]
    found = positions(len(more), row_.spans, extents, recipe)
    assert np.array_equal(found[:, : len(row_.token_ids)],
                          positions(len(row_.token_ids), row_.spans, extents, recipe))  # fmt: skip
    after = next_position(found[:, : len(row_.token_ids)])
    assert (found[:, -4:] == after + np.arange(4)).all()


def test_positions_by_hand(recipes):
    # 2 tokens of text, an image of 2 x 3 tokens, 1 of text.
    extent = extent_of(MediaFacts("image", MediaKind.PNG, 64, 96), recipes["qwen3_vl"])
    found = positions(9, [MediaSpan(0, 2, 6)], [extent], recipes["qwen3_vl"])
    assert found.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5],
        [0, 1, 2, 2, 2, 3, 3, 3, 5],
        [0, 1, 2, 3, 4, 2, 3, 4, 5],
    ]
