"""Media that cannot be used: one line that names row, medium, what is wrong, and what to do."""

import base64
import io
import json
import re
import tarfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from media_files import FOLDERS, clip, encoded, model_folder, photo, recipe_of, tone, write_lines
from PIL import Image

from relax_hpc.config import job_file
from relax_hpc.data.media.canonical import canonical, measure_medium
from relax_hpc.data.media.source import source_of
from relax_hpc.errors import ConfigError
from relax_hpc.roles.rollout import prompt_check, row_gate


def animation():
    frames = [Image.fromarray(np.full((40, 40, 3), n, np.uint8)) for n in (0, 90, 200)]
    return encoded(frames[0], "WEBP", save_all=True, append_images=frames[1:])


def sound_only():
    import av

    made = io.BytesIO()
    with av.open(made, "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=16000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 16000), np.float32), "fltp", "mono")
        frame.sample_rate = 16000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return made.getvalue()


def shows_nothing():
    """A WEBM with a track of video, and sound only."""
    import av

    made = io.BytesIO()
    with av.open(made, "w", format="webm") as container:
        shown = container.add_stream("libvpx-vp9", rate=10)
        shown.width, shown.height, shown.pix_fmt = 64, 48, "yuv420p"
        heard = container.add_stream("libopus", rate=48000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 48000), np.int16), "s16", "mono")
        frame.sample_rate = 48000
        container.mux([*heard.encode(frame), *heard.encode()])
    return made.getvalue()


def without_rate():
    """A WEBM of one frame, without the length of it: 0x23e383 begins that, 0xec a void."""
    data = clip([0], form="webm")
    at = data.index(b"\x23\xe3\x83\x84")
    return data[:at] + b"\xec\x86" + bytes(6) + data[at + 8 :]


def bomb():
    """A PNG whose header says 30,000 x 30,000 pixels."""
    data = bytearray(encoded(Image.new("1", (8, 8))))
    data[16:24] = (30000).to_bytes(4, "big") * 2
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    return bytes(data)


def no_numbers():
    """Half a second of sound in floats, one of which is no number."""
    import soundfile

    wave, made = np.sin(np.arange(8000) / 5), io.BytesIO()
    wave[777] = np.nan
    soundfile.write(made, wave, 16000, format="WAV", subtype="DOUBLE")
    return made.getvalue()


VARIABLE = [*range(10), *range(60, 90), *range(200, 210)]
CASES = {
    "empty image": ("image", b"", "is empty; replace it, or remove the line"),
    "not an image": ("image", b"hello", "is none of the encodings that are known; save it as JPEG"),
    "truncated png": ("image", photo(90, 90)[:-900], "is PNG that cannot be decoded: "),
    "a video as image": ("image", clip([0, 1]), "is MP4, of video; name it under videos"),
    "animation": ("image", animation(), "is an animation of 3 frames; save one of them"),
    "aspect": (
        "image",
        encoded(Image.new("L", (900, 4))),
        "has 900 x 4 pixels: one side is more than 200 times",
    ),
    "bomb": ("image", bomb(), "has too many pixels: "),
    "no video in it": ("video", sound_only(), "is MP4 without a video; replace it"),
    "no frames": ("video", shows_nothing(), "has no frames; replace it, or remove the line"),
    "no rate": ("video", without_rate(), "does not say how many frames it has a second; write it"),
    "short video": ("video", clip([0, 1, 2]), "has 3 frames, fewer than prompts.media.video_fram"),
    "variable rate": ("video", clip(VARIABLE), "has frames at a variable rate: number "),
    "no sound": ("audio", tone(0), "has 0 s of sound, fewer than 0.025; replace it"),
    "silence": ("audio", tone(0.5, loud=0), "is silent; replace it, or remove the line"),
    "no numbers": ("audio", no_numbers(), "has samples that are infinite or no numbers; write"),
    "rate": ("audio", tone(0.1, 800_000), "has 800,000 samples a second, more than 768,000; wri"),
    "8 channels": ("audio", tone(0.5, channels=8), "has 8 channels; mix it down to one or two"),
    "long sound": ("audio", tone(2.5), "has 2.5 s of sound, prompts.media.advanced.audio_max_s ="),
    "truncated sound": ("audio", tone(0.5, form="FLAC")[:60], "is FLAC that cannot be decoded: "),
}
"""With 2 s of sound, 5 frames a second."""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return recipe_of(
        tmp_path_factory.mktemp("m"), "qwen3_omni_moe", advanced={"audio_max_s": 2}, video_fps=5
    )


REFERENCES = {
    "no file": ("image", "gone.png", "gone.png: "),
    "a folder": ("image", "a", "a: is a folder"),
    "a URL": ("image", "https://there/x.png", "a job downloads nothing: download it before"),
    "out of the folder": ("image", "../x.png", "is outside prompts.media.advanced.folder = "),
    "a link out of the folder": ("image", "link.png", "elsewhere.png, outside prompts.media.adva"),
    "a folder behind a link": ("image", "away/elsewhere.png", "is a link to /"),
    "a frame behind a link": ("video", ["ok.png", "link.png"] * 3, "frame 2 (link.png): is a link"),
    "a tar behind a link": ("image", "link.tar:x.png:512:9", "elsewhere.tar, outside prompts.me"),
    "beyond a tar": ("image", "a.tar:x.png:512:99999999", "ends at byte 100,000,511 of a file of"),
    "beside a file of a tar": ("image", "a.tar:x.png:100:50", "is none of the encodings"),
    "a frame is missing": ("video", ["ok.png", "gone.png"] * 3, ", frame 2: "),
    "frames of two sizes": ("video", ["ok.png", "wide.png"] * 3, "has 100 x 60 pixels, the first"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("data")
    (made / "a").mkdir()
    (made / "ok.png").write_bytes(photo(60, 60))
    (made / "wide.png").write_bytes(photo(60, 100))
    with tarfile.open(made / "a.tar", "w") as archive:
        archive.add(made / "ok.png", "x.png")
    away = tmp_path_factory.mktemp("away")
    for form, name in (("png", "ok.png"), ("tar", "a.tar")):
        (away / f"elsewhere.{form}").write_bytes((made / name).read_bytes())
        (made / f"link.{form}").symlink_to(away / f"elsewhere.{form}")
    (made / "away").symlink_to(away)
    return made


@pytest.mark.parametrize("case", REFERENCES)
def test_a_name_that_leads_nowhere_is_refused(recipe, folder, case):
    modality, value, expected = REFERENCES[case]
    with pytest.raises(ConfigError, match=re.escape(expected)):
        measured = measure_medium(
            source_of("x", modality, value, folder=folder, inside=True), recipe
        )
        canonical(measured, recipe)


def test_links_that_stay_in_the_folder_are_followed_and_without_a_folder_all(folder, tmp_path):
    (tmp_path / "data").symlink_to(folder)
    (folder / "again.png").symlink_to("ok.png")
    inside = source_of("x", "image", "again.png", folder=tmp_path / "data", inside=True)
    anywhere = source_of("x", "image", "link.png", folder=folder)
    assert inside.read() == anywhere.read() == (folder / "ok.png").read_bytes()


def test_each_medium_that_cannot_be_used_is_a_line_of_a_check_and_the_job_is_refused(
    refused, recipe, folder
):
    """All of them in one file, by the command line: exit code 2, and nothing is created."""
    for case, (_, data, _) in CASES.items():
        (folder / case).write_bytes(data)
    every = [(modality, case, said) for case, (modality, _, said) in CASES.items()]
    every += REFERENCES.values()
    write_lines(
        Path("train.jsonl"),
        [{"prompt": f"<{kind}>?", "answer": "1", f"{kind}s": [given]} for kind, given, _ in every],
    )
    settings = {
        "model.path": model_folder(Path("omni"), "qwen3_omni_moe"),
        "prompts.media.advanced.folder": folder, "prompts.media.advanced.audio_max_s": 2,
        "prompts.media.video_fps": 5, "engines.rollout.kind": "sglang",
    }  # fmt: skip
    given = [f"{key}={value}" for key, value in settings.items()]
    files = prompt_check.open_files(job_file.load(Path("job.toml"), given)).by_key
    found = row_gate.decode(files, recipe, None, lambda *_: None)
    lines = {each.reason.partition(": ")[0]: each.reason for each in found.refused}
    assert found.num_media == len(found.refused) == len(lines) == len(every)
    for number, (modality, _, expected) in enumerate(every, start=1):
        place = f"train.jsonl, line {number}"
        assert lines[place].startswith(f"{place}: {modality} 1") and "\n" not in lines[place]
        assert ";" in lines[place] and expected in lines[place]
    said, *shown, rest, remedy = refused(
        "check", "job.toml", "--decode", *(f"--set={each}" for each in given)
    ).splitlines()
    assert f"{len(every)} of {len(every)} media cannot be used" in said
    assert set(shown) < set(lines.values()) and rest == f"and {len(every) - len(shown)} more"
    assert "prompts.media.advanced.broken" in remedy


def test_every_way_to_name_an_image_gives_the_same_bytes(recipe, folder):
    data = (folder / "ok.png").read_bytes()
    with tarfile.open(folder / "a.tar") as archive:
        [member] = archive.getmembers()
    written = base64.b64encode(data).decode()
    values = [
        "ok.png", str(folder / "ok.png"), data, {"bytes": data, "path": "x"}, {"path": "ok.png"},
        f"data:image/png;base64,{written}", f"a.tar:x.png:{member.offset_data}:{member.size}",
    ]  # fmt: skip
    sources = [source_of("x", "image", value, folder=folder) for value in values]
    assert [each.read() for each in sources] == [data] * len(values)
    digests = {canonical(measure_medium(each, recipe), recipe).digest for each in sources}
    assert len(digests) == 1


FILE = "preprocessor_config.json"
MODELS = {
    "no preprocessor": ({FILE: None, "video_preprocessor_config.json": None}, "has neither proce"),
    "mean": ({FILE: {"image_mean": 0.5}}, "image_mean = 0.5: three numbers are expected"),
}


@pytest.mark.parametrize("case", MODELS)
def test_a_model_folder_whose_preprocessor_cannot_be_followed_is_refused(refused, case):
    """By the command line: exit code 2, one line, and nothing is created."""
    changes, expected = MODELS[case]
    folder = model_folder(Path("model"), "qwen3_vl")
    for name, change in changes.items():
        (folder / name).unlink()
        if change is not None:
            (folder / name).write_text(json.dumps(FOLDERS["qwen3_vl"][name] | change))
    said = refused("check", "job.toml", "--decode", "--set=engines.rollout.kind=sglang")
    assert expected in said and "download" in said and "\n" not in said
