"""Media that cannot be used: one line that names row, medium, what is wrong, and what to do."""

import base64
import json
import tarfile
from pathlib import Path

import pytest
from bad_media import CASES
from media_files import FOLDERS, model_folder, photo, recipe_of, write_lines

from relax_hpc.config import job_file
from relax_hpc.config.prompts import MediaConfig
from relax_hpc.data.media.canonical import canonical, measure_medium
from relax_hpc.data.media.recipe import read_recipe
from relax_hpc.data.media.source import source_of
from relax_hpc.errors import ConfigError
from relax_hpc.roles.rollout import prompt_check, row_gate

PLACE = "x.jsonl, line 3: {} 1"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return recipe_of(
        tmp_path_factory.mktemp("m"), "qwen3_omni_moe", advanced={"audio_max_s": 2}, video_fps=5
    )


def refusal(modality, value, recipe, folder=Path("/data"), **more):
    place = PLACE.format(modality)
    with pytest.raises(ConfigError) as caught:
        medium = measure_medium(source_of(place, modality, value, folder=folder, **more), recipe)
        canonical(medium, recipe)
    said = str(caught.value)
    assert said.startswith(place) and "\n" not in said and len(said) < 400, said
    return said.removeprefix(place)


REFERENCES = {
    "no file": ("image", "gone.png", "gone.png: "),
    "a folder": ("image", "a", "a: is a folder"),
    "a URL": ("image", "https://there/x.png", "a job downloads nothing: download it before"),
    "out of the folder": ("image", "../x.png", "is outside prompts.media.advanced.folder = "),
    "a link out of the folder": ("image", "link.png", "elsewhere.png, outside prompts.media.adva"),
    "a folder behind a link": ("image", "away/elsewhere.png", "is a link to /"),
    "a frame behind a link": ("video", ["ok.png", "link.png"] * 3, "frame 2 (link.png): is a link"),
    "a tar behind a link": ("image", "link.tar:x.png:512:9", "elsewhere.tar, outside prompts.me"),
    "a number": ("image", 3, "is 3; write a path, {bytes}, a data: URL, or file.tar:"),
    "nothing": ("image", "", "is ''; write a path"),
    "a data: URL of text": ("image", "data:text/plain,hello", "is a data: URL that is not base64"),
    "beyond a tar": ("image", "a.tar:x.png:512:99999999", "ends at byte 100,000,511 of a file of"),
    "beside a file of a tar": ("image", "a.tar:x.png:100:50", "is none of the encodings"),
    "frames without a rate": ("video", {"frames": ["x.png"]}, "has frames and fps = None; give"),
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
    assert expected in refusal(modality, value, recipe, folder, inside=True)


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


def test_a_jpeg_that_is_called_png_is_decoded_as_what_it_is(recipe, tmp_path):
    (tmp_path / "x.png").write_bytes(photo(form="JPEG"))
    found = measure_medium(source_of("x", "image", "x.png", folder=tmp_path), recipe)
    assert found.facts.kind.name == "JPEG"


FILE = "preprocessor_config.json"
MODELS = {
    "no preprocessor": ({FILE: None, "video_preprocessor_config.json": None}, "has neither proce"),
    "no image processor": ({FILE: None}, "processor_config.json: has no image_processor"),
    "mean": ({FILE: {"image_mean": 0.5}}, "image_mean = 0.5: three numbers are expected"),
    "filter": ({FILE: {"resample": 2}}, "resample = 2: only 3, bicubic, is followed"),
    "size": (
        {FILE: {"size": {"shortest_edge": 9, "longest_edge": 8}}},
        "shortest_edge and longest_edge are expected, in pixels",
    ),
    "no resizing": ({FILE: {"do_resize": False}}, "do_resize = False: only true is followed"),
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


def test_a_model_of_text_has_no_recipe(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    assert read_recipe(tmp_path, MediaConfig()) is None


def test_bounds_that_are_turned_around_are_refused():
    with pytest.raises(ValueError, match=r"the first is the smaller one; write \[4, 64\]"):
        MediaConfig(image_tokens=[64, 4])


@pytest.mark.parametrize(
    ("actor", "said"),
    [
        ({"frozen": ["eyes"]}, "actor.frozen.0 = 'eyes': use 'language', 'vision',"),
        ({"frozen": "vision"}, "actor.frozen = 'vision': use a list, in brackets"),
    ],
)
def test_parts_and_layouts_that_a_model_that_sees_cannot_have_are_refused(actor, said):
    job = {
        "name": "t", "model": {"path": "m"}, "prompts": {"train": "x"},
        "schedule": {"num_steps": 1}, "actor": actor,
    }  # fmt: skip
    with pytest.raises(ConfigError) as refused:
        job_file.validate(job, source="job.toml")
    assert said in str(refused.value) and "\n" not in str(refused.value)
