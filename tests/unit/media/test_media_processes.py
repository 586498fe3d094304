"""The same bytes make the same array in every process, whatever its threads; nobody imports more
than a medium needs."""

import os
import subprocess
import sys

import pytest
from media_files import clip, model_folder, photo, seen, tone

from relax_hpc.config.prompts import MediaConfig
from relax_hpc.data.media.recipe import read_recipe

PROGRAM = """
import sys
from pathlib import Path
from relax_hpc.config.prompts import MediaConfig
from relax_hpc.data.media.canonical import canonical, measure_medium
from relax_hpc.data.media.recipe import read_recipe
from relax_hpc.data.media.source import MediaSource
recipe = read_recipe(Path(sys.argv[1]), MediaConfig(video_frames=[2, 8]))
for name in sys.argv[2:]:
    medium = MediaSource("x", name.partition("-")[0], path=Path(sys.argv[1]) / name)
    print(canonical(measure_medium(medium, recipe), recipe).digest.hex())
print("torch" in sys.modules)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = model_folder(tmp_path_factory.mktemp("model"), "qwen3_omni_moe")
    (made / "image-1").write_bytes(photo(500, 700, "JPEG"))
    (made / "video-1").write_bytes(clip(range(20)))
    (made / "audio-1").write_bytes(tone(0.7, 44100))
    return made


def digests_of(folder, names):
    recipe = read_recipe(folder, MediaConfig(video_frames=[2, 8]))
    made = (seen((folder / n).read_bytes(), recipe, n.partition("-")[0]) for n in names)
    return [each.digest.hex() for each in made]


def in_a_process(folder, threads, names):
    command = [sys.executable, "-c", PROGRAM, str(folder), *names]
    count = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    ran = subprocess.run(
        command, env=os.environ | count, capture_output=True, text=True, check=True
    )
    return ran.stdout.split()


def test_digests_are_the_same_in_fresh_processes_with_one_and_two_threads(folder):
    seen = ["image-1", "video-1"]
    *one, has_torch = in_a_process(folder, 1, seen)
    assert has_torch == "False", "pixels are made without torch"
    *two, _ = in_a_process(folder, 2, [*seen, "audio-1"])
    assert [*one, two[-1]] == two == digests_of(folder, [*seen, "audio-1"])
    assert len(set(two)) == 3
