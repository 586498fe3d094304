"""Videos that are heard: from the file to the bus and back, and what cannot be."""

import numpy as np
import pytest
from bus_fixtures import trajectory
from media_files import (
    clip,
    film,
    model_folder,
    photo,
    prepared,
    prompts_of,
    recipe_of,
    source,
    tokenizer,
    write_lines,
)  # fmt: skip
from test_media_stored import put

from relax_hpc.bus.reader import Reader
from relax_hpc.bus.shards import media
from relax_hpc.bus.shards.shard import Shard
from relax_hpc.bus.tools import export, inventory
from relax_hpc.config.prompts import MediaConfig
from relax_hpc.data.media import decode
from relax_hpc.data.media.canonical import canonical, measure_media
from relax_hpc.data.media.expand import MediaSpan, positions
from relax_hpc.data.media.kinds import modality_of
from relax_hpc.data.media.recipe import read_recipe
from relax_hpc.data.media.spool import MediaView, Spooled
from relax_hpc.errors import ConfigError
from relax_hpc.roles.rollout.row_gate import _decode
from relax_hpc.schema import PromptGroup

SETTINGS = {"video_tokens_per_frame": [2, 16], "advanced": {"audio_in_video": True}}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return recipe_of(tmp_path_factory.mktemp("models"), "qwen3_omni_moe", **SETTINGS)


@pytest.mark.parametrize(
    ("how", "lasts_s", "is_heard"),
    [
        ({}, 2.0, (0.0, 2.0)),
        ({"heard_s": 3.3}, 3.3, (0.0, 3.3)),
        ({"heard_s": 1.0, "later_s": 0.5}, 1.5, (0.5, 1.5)),
        ({"form": "webm", "heard_s": 0.7}, 2.0, (0.0, 0.7)),  # that of the longer stream is known
        ({"form": "webm", "heard_s": 1.0, "later_s": 0.5}, 2.0, (0.5, 1.5)),
    ],
)
def test_a_sound_begins_with_the_first_frame_and_lasts_as_long_as_the_header_says(
    recipe, how, lasts_s, is_heard
):
    heard = source(film(**how), "video").its_sound
    facts = decode.sound_facts(heard)
    assert facts.num_samples / facts.sampling_rate == pytest.approx(lasts_s, abs=0.01)
    samples = decode.decode_sound(heard, recipe.audio)
    assert len(samples) == facts.num_samples * 16000 // facts.sampling_rate
    loud = np.flatnonzero(np.abs(samples) > 0.1) / 16000
    assert (loud[0], loud[-1]) == pytest.approx(is_heard, abs=0.005)
    strength = np.abs(np.fft.rfft(samples))
    assert strength.argmax() * 16000 / len(samples) == pytest.approx(440, abs=2)


def test_frames_and_sound_take_turns_by_time(recipe):
    """2 s of 10 frames a second give 4 frames, two pairs a second apart; 13 tokens a second."""
    video, sound = measure_media([source(film(), "video")], recipe)
    assert (video.extent.modality, sound.extent.modality) == ("video", "audio")
    assert video.extent.grid[0] == 2 and video.extent.seconds_per_grid == 1.0
    per_pair = video.extent.grid[1] * video.extent.grid[2] // 4
    assert video.extent.tokens == (per_pair, per_pair)
    assert sound.extent.mel_frames == 200 and sound.extent.tokens == (13, 13)
    assert sound.extent.is_of_video and not video.extent.is_of_video


def test_a_video_without_sound_is_seen_only_and_a_silent_one_is_heard(recipe):
    frames = source(None, "video")._replace(frames=(source(photo(48, 64)),) * 4, fps=2.0)
    for given in (source(clip(range(20)), "video"), frames):
        assert [m.extent.modality for m in measure_media([given], recipe)] == ["video"]
    assert [m.extent.modality for m in measure_media([source(film(), "video")], recipe)] == [
        "video", "audio",
    ]  # fmt: skip
    silent = measure_media([source(film(heard_s=1.0, later_s=1.0), "video")], recipe)
    assert canonical(silent[1], recipe).array.shape == (128, 200)
    deaf = recipe._replace(audio_in_video=False)
    assert len(measure_media([source(film(), "video")], deaf)) == 1


def test_what_cannot_be_heard_is_named_with_its_video_and_what_to_do(recipe):
    for given, message in (
        (film(channels=6), "3: video 1, its sound: has 6 channels; mix it down to one or two"),
        (film(heard_s=0.02), "its sound: has 0.02 s of sound, fewer than 0.025; replace it"),
    ):
        for act in (lambda given: measure_media([given], recipe), lambda g: _decode(g, recipe)):
            with pytest.raises(ConfigError) as caught:
                act(source(given, "video"))
            assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_model_without_ears_refuses_it_by_name(tmp_path):
    folder = model_folder(tmp_path, "qwen3_vl")
    with pytest.raises(ConfigError, match=r"audio_in_video = true: .* qwen3_vl, does not"):
        read_recipe(folder, MediaConfig(advanced={"audio_in_video": True}))


@pytest.fixture
def prompt(tmp_path):
    (tmp_path / "a.mp4").write_bytes(film())
    (tmp_path / "b.mp4").write_bytes(film(heard_s=0.7))
    (tmp_path / "s.mp4").write_bytes(clip(range(20)))
    row = {"prompt": "<video><video>or<video>?", "videos": ["a.mp4", "s.mp4", "b.mp4"],
           "answer": "1"}  # fmt: skip
    file = write_lines(tmp_path / "x.jsonl", [row])
    model = model_folder(tmp_path / "model", "qwen3_omni_moe")
    return prompts_of(file, model, tokenizer(), media=SETTINGS, max_prompt_tokens=4000)[0]


def test_a_prompt_is_written_with_both(prompt):
    """Two videos have sound, each a pair of media; the one between is seen alone."""
    kinds = [each.extent.modality for each in prompt.measured]
    assert kinds == ["video", "audio", "video", "video", "audio"]
    assert [span.medium for span in prompt.spans] == [0, 1, 0, 1, 2, 3, 4, 3]
    of = tokenizer().convert_tokens_to_ids
    start, end = of("<|audio_start|>"), of("<|audio_end|>")
    ids = prompt.token_ids
    assert (ids.count(start), ids.count(end)) == (2, 2)
    first = prompt.spans[0].first
    assert ids[first - 2 : first] == [of("<|vision_start|>"), start]
    assert ids.count(of("<|audio_pad|>")) == 26 + 9  # 0.7 s are 70 mel frames


def shown_by(prompt, recipe, **options):
    made, arrays = prepared(recipe, prompt.measured, spans=prompt.spans, **options)
    return made.media, arrays


@pytest.mark.parametrize("store", ["source", "canonical"])
def test_the_bus_has_the_bytes_of_a_video_once_and_gives_back_both(prompt, recipe, tmp_path, store):
    made, arrays = shown_by(prompt, recipe, store=store)
    spans = np.array(prompt.spans, np.int32)
    size = max(span.first + span.tokens for span in prompt.spans) + 5
    rows = [trajectory(0, n, prompt=size)._replace(media=made, media_spans=spans) for n in range(2)]
    # Another group hears only: of the first video, whose bytes the first group has.
    alone = trajectory(1, 0, prompt=40)._replace(
        media=made[1:2], media_spans=np.array([[0, 3, 26]], np.int32)
    )
    paths, path = put(tmp_path, [PromptGroup(0, rows), PromptGroup(1, [alone])])
    reader, record = Reader(paths), inventory.of_guid(paths, 0)
    [row] = reader.rows(record, [1], media.FACTS)
    assert [modality_of(each) for each in row.media] == [
        "video", "audio", "video", "video", "audio",
    ]  # fmt: skip
    for wanted in (range(5), [4], [1]):
        found = reader.media(record, [(1, n) for n in wanted])
        for number, each in zip(wanted, found, strict=True):
            assert np.array_equal(each.canonical(recipe).array, arrays[number])
    [whole] = reader.rows(record, [0])
    assert [m.data.tobytes() for m in whole.media] == [m.data.tobytes() for m in made]
    [hears] = reader.rows(inventory.of_guid(paths, 1), [0])
    assert hears.media[0].data.tobytes() == made[1].data.tobytes()
    if store == "source":
        with Shard(path) as shard:
            videos = sum(len(made[n].data) for n in (0, 2, 3))
            assert shard.fields["ragged/media_bytes"].shape == (videos,)
        files = export.write(paths, 0, tmp_path / "out")
        assert [each.kind for each in files] == ["MP4"] * 5


def test_trainers_find_the_positions_that_the_engine_was_given(prompt, recipe):
    """By what the bus has: kinds, grids and seconds of media, and spans."""
    from relax_hpc.trainer.megatron.packing import find_feature_spans, position_ids

    made, _ = shown_by(prompt, recipe)
    spans = np.array(prompt.spans, np.int32)
    row = trajectory(0, 0, prompt=len(prompt.token_ids))._replace(media=made, media_spans=spans)
    length = len(row.token_ids)
    extents = [each.extent for each in prompt.measured]
    given = positions(length, [MediaSpan(*s) for s in spans.tolist()], extents, recipe)
    assert np.array_equal(position_ids([row], 0, recipe).numpy().T, given)
    assert [s.offset for s in find_feature_spans([row], recipe)][:4] == [0, 0, *[
        span.tokens for span in prompt.spans[:2]
    ]]  # fmt: skip


def test_views_of_the_same_frames_at_other_times_are_not_the_same(recipe, tmp_path):
    """The key of cached prefixes: what is cached depends on positions."""
    made = []
    for fps in (2.0, 3.0):
        frames = (source(photo(48, 64)),) * 4
        [video] = measure_media([source(None, "video")._replace(frames=frames, fps=fps)], recipe)
        made.append(Spooled(video.extent, canonical(video, recipe).digest, tmp_path / "a"))
    assert made[0].digest == made[1].digest
    assert MediaView((made[0],), ()).digest != MediaView((made[1],), ()).digest
