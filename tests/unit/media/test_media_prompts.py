"""Rows with media: places, tokens, and one line for each that cannot be used."""

from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from media_files import clip, model_folder, photo, prompts_of, tokenizer, tone, write_lines

from relax_hpc.config.prompts import PromptsConfig
from relax_hpc.data.overlap import find
from relax_hpc.errors import ConfigError
from relax_hpc.roles.rollout import prompt_check

IMAGE, VIDEO, AUDIO = "<|image_pad|>", "<|video_pad|>", "<|audio_pad|>"
TWO = {"prompt": "<image>is it <image>?", "images": ["a.png", "b.png"], "answer": "1"}


@pytest.fixture(scope="module")
def tokens():
    return tokenizer()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    made = tmp_path_factory.mktemp("data")
    (made / "a.png").write_bytes(photo(64, 96))
    (made / "b.png").write_bytes(photo(320, 320))
    (made / "c.mp4").write_bytes(clip(range(20)))
    (made / "d.wav").write_bytes(tone(0.5))
    (made / "cut.png").write_bytes(photo(64, 96)[:300])
    (made / "text.png").write_text("no image")
    return made


@pytest.fixture
def source(data, tokens, tmp_path):
    def make(*rows, model="qwen3_omni_moe", media=None, **settings):
        file = write_lines(data / f"{tmp_path.name}.jsonl", rows)
        settings = {"max_prompt_tokens": 4000, "media": media or {}} | settings
        folder = model_folder(tmp_path / "model", model) if model else tmp_path
        return prompts_of(file, folder, tokens, **settings)

    return make


def refusal(made):
    with pytest.raises(ConfigError) as caught:
        made.prompt(0)
    said = str(caught.value)
    assert "\n" not in said and said.startswith(f"{made.records.files[0]}, line 1: ")
    return said.partition(", line 1: ")[2]


def test_media_stand_where_the_markers_are_with_as_many_tokens_as_they_have(source, tokens):
    made = source(TWO, media={"image_tokens": [1, 100]}).prompt(0)
    pad = tokens.convert_tokens_to_ids(IMAGE)
    # 2 x 3 and 10 x 10 tokens of 32 x 32 pixels.
    assert [span.tokens for span in made.spans] == [6, 100]
    assert made.token_ids.count(pad) == 106
    text = tokens.decode([t for n, t in enumerate(made.token_ids) if t != pad])
    assert text == (
        "<|im_start|>user\n<|vision_start|><|vision_end|>is it <|vision_start|><|vision_end|>?"
        "<|im_end|>\n<|im_start|>assistant\n"
    )
    assert [medium.source.given for medium in made.measured] == ["a.png", "b.png"]
    assert made.metadata == {} and made.messages[0]["content"][0] == {"type": "image"}


def test_parts_markers_and_inline_media_say_the_same(source):
    image, text = {"type": "image"}, {"type": "text", "text": "is it "}
    end = {"type": "text", "text": "?"}

    def asked(content, **columns):
        return {"prompt": [{"role": "user", "content": content}], "answer": "1", **columns}

    rows = [
        TWO,
        asked([image, text, image, end], images=["a.png", "b.png"]),
        asked([image | {"image": "a.png"}, text, image, end], images=["b.png"]),
        asked([image | {"image": "a.png"}, text, image | {"image": {"path": "b.png"}}, end]),
    ]
    made = source(*rows)
    found = [made.prompt(n) for n in range(4)]
    assert [each.token_ids for each in found] == [found[0].token_ids] * 4
    assert [each.messages for each in found] == [found[0].messages] * 4


def test_all_media_of_a_row_are_in_the_order_of_their_places(source, tokens):
    every = {"images": "a.png", "videos": ["c.mp4"], "audios": ["d.wav"]}
    made = source(rows_of("<audio> then <video> then <image>", **every)).prompt(0)
    assert [m.extent.modality for m in made.measured] == ["audio", "video", "image"]
    firsts = [made.token_ids.index(tokens.convert_tokens_to_ids(t)) for t in (AUDIO, VIDEO, IMAGE)]
    assert [span.first for span in made.spans] == firsts == sorted(firsts)


def test_rows_of_text_are_what_they_were_before_with_every_model(source):
    rows = [
        {"prompt": "the tag <video>", "answer": "1", "images": []},
        {"prompt": [{"role": "user", "content": "x"}], "answer": "1", "level": 2},
    ]
    before = source(*rows, model=None)
    assert before.prompt(0).messages == [{"role": "user", "content": "the tag <video>"}]
    assert before.prompt(0).metadata == {"images": []}
    expected = before.prompt(1).token_ids
    after = source(rows[1])
    assert after.prompt(0).token_ids == expected
    assert (after.prompt(0).spans, after.prompt(0).measured) == ((), ())


def test_images_of_parquet_are_read_as_the_hub_writes_them(tmp_path, tokens):
    image = {"bytes": photo(64, 64), "path": None}
    table = pa.table({"q": ["<image>x"], "image": [image], "a": ["1"]})
    pq.write_table(table, tmp_path / "x.parquet")
    columns = {"prompt": "q", "answer": "a", "images": "image"}
    model = model_folder(tmp_path / "m", "qwen3_vl")
    made = prompts_of(tmp_path / "x.parquet", model, tokens, columns=columns)
    assert made.prompt(0).measured[0].facts.height == 64
    assert find(made.records, {}).num_train == 1


def rows_of(prompt="<image>x", **columns):
    return {"prompt": prompt, "answer": "1", **columns}


BAD = {
    "fewer places": (rows_of("x", images=["a.png"]), "images holds 1, and the prompt has 0 places"),
    "no media": (rows_of(), "the text has 1 places for media, and the row has none; give them"),
    "placeholder": (rows_of(f"<image>{IMAGE}", images=["a.png"]), f"the text holds {IMAGE}, which"),
    "audio": (
        rows_of("<audio>x", audios=["d.wav"]), {"model": "qwen3_vl"},
        "audio 1 (d.wav): is audio, which qwen3_vl does not take; it takes image",
    ),
    "a model of text": (
        TWO, {"model": None}, "has 2 of image, video or audio, and the model reads text only; use",
    ),
    "no template": (TWO, {"chat_template": False}, "has media; set prompts.chat_templ"),
    "too long": (
        rows_of("<image><audio>x", images=["b.png"], audios=["d.wav"]), {"max_prompt_tokens": 100},
        "tokens (100 of image, 7 of audio, ... of text), prompts.max_prompt_tok",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_row_that_cannot_be_used_is_named_with_its_medium_and_what_to_do(source, case):
    row, *settings, expected = BAD[case]
    said = refusal(source(row, **dict(*settings)))
    assert all(words in said for words in expected.split("..."))


def test_a_template_that_leaves_a_medium_out_is_refused(source, tokens, monkeypatch):
    monkeypatch.setattr(tokens, "chat_template", "{{ messages[0].content[1].text }}")
    said = refusal(source(rows_of(images=["a.png"])))
    assert said.startswith(f"the chat template writes {IMAGE} 0 times for 1 of image; use the mod")


def test_rows_with_bad_media_are_left_out_once_and_listed(source):
    rows = [TWO, rows_of(images=["gone.png"]), rows_of(images=["text.png"]), TWO]
    with pytest.raises(ConfigError, match=r"gone\.png"):
        source(*rows, bad_rows="skip").examine(range(4))
    made = source(*rows, media={"advanced": {"broken": "skip"}})
    found = made.examine(range(4))
    assert [row for row, _ in found.bad] == [1, 2] and "image 1 (text.png): is" in found.bad[1][1]
    assert found.longest == len(made.prompt(0).token_ids)
    made.leave_out(dict(found.bad))
    assert [made[n].index for n in range(4)] == [0, 3, 0, 3]


def test_a_row_that_names_a_medium_in_no_known_way_is_one_with_a_bad_medium(source):
    url = rows_of(images=["https://x.org/a.png"])
    with pytest.raises(ConfigError, match="downloads nothing"):
        source(TWO, url, bad_rows="skip").records.read()
    records = source(TWO, url, media={"advanced": {"broken": "skip"}}).records
    records.read()
    assert list(records.bad) == [1]


def job(path, kind="sglang", **media):
    prompts = PromptsConfig(train="x", media=media)
    model, pool = SimpleNamespace(path=path), SimpleNamespace(kind=kind)
    return SimpleNamespace(prompts=prompts, model=model, rollout_pool=pool, seed=1)


def test_media_are_refused_by_the_name_of_what_cannot_take_them(tmp_path, tokens):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(ConfigError, match=r"prompts.media.video_fps: the model in .* reads text"):
        prompt_check.sources_of(job(tmp_path, video_fps=1.0), None, tokens)
    folder = model_folder(tmp_path / "vl", "qwen3_vl")
    with pytest.raises(ConfigError, match=r'engines.rollout.kind = "embedded": it takes no images'):
        prompt_check.sources_of(job(folder, "embedded"), None, tokens)
