"""Media that cannot be used: one line that names row, medium, what is wrong, and what to do."""

import base64
import json
import tarfile
from pathlib import Path

import pytest
from bad_media import CASES
from media_files import FOLDERS, model_folder, photo, recipe_of

from relax_hpc import job_file
from relax_hpc.config.media import MediaConfig
from relax_hpc.errors import ConfigError
from relax_hpc.media.canonical import canonical, measured
from relax_hpc.media.recipe import read_recipe
from relax_hpc.media.source import source_of

PLACE = "x.jsonl, line 3: {} 1"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return recipe_of(tmp_path_factory.mktemp("m"), "qwen3_omni_moe", audio_max_s=2, video_fps=5)


def refusal(modality, value, recipe, folder=Path("/data"), **more):
    place = PLACE.format(modality)
    with pytest.raises(ConfigError) as caught:
        medium = measured(source_of(place, modality, value, folder=folder, **more), recipe)
        canonical(medium, recipe)
    said = str(caught.value)
    assert said.startswith(place) and "\n" not in said and len(said) < 400, said
    return said.removeprefix(place)


@pytest.mark.parametrize("case", CASES)
def test_a_medium_that_cannot_be_used_is_named_with_what_to_do(recipe, tmp_path, case):
    modality, data, expected = CASES[case]
    said = refusal(modality, data, recipe)
    assert said.startswith(f": {expected}") or expected in said
    assert ";" in said, "what to do"
    (tmp_path / "named").write_bytes(data)
    assert refusal(modality, "named", recipe, tmp_path).startswith(" (named): ")


REFERENCES = {
    "no file": ("image", "gone.png", "gone.png: "),
    "a folder": ("image", "a", "a: is a folder"),
    "a URL": ("image", "https://there/x.png", "a job downloads nothing: download it before"),
    "out of the folder": ("image", "../x.png", "is outside prompts.media.folder = "),
    "away from the folder": ("image", "/etc/hosts", "is outside prompts.media.folder = "),
    "a number": ("image", 3, "is 3; write a path, {bytes}, a data: URL, or file.tar:"),
    "nothing": ("image", "", "is ''; write a path"),
    "no bytes": ("image", {"bytes": None, "path": None}, "write a path, {bytes}"),
    "a data: URL of text": ("image", "data:text/plain,hello", "is a data: URL that is not base64"),
    "half of a data: URL": ("image", "data:image/png;base64,abc", "is a data: URL that is not"),
    "beyond a tar": ("image", "a.tar:x.png:512:99999999", "ends at byte 100,000,511 of a file of"),
    "beside a file of a tar": ("image", "a.tar:x.png:100:50", "is none of the encodings"),
    "no frames": ("video", [], "is []; write a path"),
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
    return made


@pytest.mark.parametrize("case", REFERENCES)
def test_a_name_that_leads_nowhere_is_refused(recipe, folder, case):
    modality, value, expected = REFERENCES[case]
    assert expected in refusal(modality, value, recipe, folder, inside=True)


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
    digests = {canonical(measured(each, recipe), recipe).digest for each in sources}
    assert len(digests) == 1


def test_a_jpeg_that_is_called_png_is_decoded_as_what_it_is(recipe, tmp_path):
    (tmp_path / "x.png").write_bytes(photo(form="JPEG"))
    found = measured(source_of("x", "image", "x.png", folder=tmp_path), recipe)
    assert found.facts.kind.name == "JPEG"


FILE = "preprocessor_config.json"
MODELS = {
    "no preprocessor": ({FILE: None, "video_preprocessor_config.json": None}, "has neither proce"),
    "no image processor": ({FILE: None}, "processor_config.json: has no image_processor"),
    "patch": ({FILE: {"patch_size": 0}}, "patch_size = 0: a positive integer is expected"),
    "mean": ({FILE: {"image_mean": 0.5}}, "image_mean = 0.5: three numbers are expected"),
    "filter": ({FILE: {"resample": 2}}, "resample = 2: only 3, bicubic, is followed"),
    "scale": ({FILE: {"rescale_factor": 1.0}}, "rescale_factor = 1.0: only 1/255 is followed"),
    "size": (
        {FILE: {"size": {"shortest_edge": 9, "longest_edge": 8}}},
        "shortest_edge and longest_edge are expected, in pixels",
    ),
    "no resizing": ({FILE: {"do_resize": False}}, "do_resize = False: only true is followed"),
}


@pytest.mark.parametrize("case", MODELS)
def test_a_model_folder_whose_preprocessor_cannot_be_followed_is_refused(tmp_path, case):
    changes, expected = MODELS[case]
    model_folder(tmp_path, "qwen3_vl")
    for name, change in changes.items():
        (tmp_path / name).unlink()
        if change is not None:
            (tmp_path / name).write_text(json.dumps(FOLDERS["qwen3_vl"][name] | change))
    with pytest.raises(ConfigError) as caught:
        read_recipe(tmp_path, MediaConfig())
    assert expected in str(caught.value) and "download" in str(caught.value)


def test_a_model_of_text_has_no_recipe(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    assert read_recipe(tmp_path, MediaConfig()) is None


def test_bounds_that_are_turned_around_are_refused():
    with pytest.raises(ValueError, match=r"the first is the smaller one; write \[4, 64\]"):
        MediaConfig(image_tokens=[64, 4])


@pytest.mark.parametrize(
    ("actor", "said"),
    [
        ({"frozen": ["eyes"]}, "actor.frozen.0 = 'eyes': input should be 'language', 'vision',"),
        ({"frozen": "vision"}, "actor.frozen = 'vision': input should be a valid list"),
        (
            {"sequence_parallel": False},
            "is gone, it is on wherever layout.tensor_parallel is above",
        ),
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
