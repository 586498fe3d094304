"""A trainer of two ranks publishes a model that sees: the same image is seen by the new tower."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from houses import house_of, publish, trainer
from safetensors.torch import load_file
from seer import AUDIO, IMAGE, TOLERANCE, VIDEO, Hearer, Seer, ask, clip, make, sound, source
from sglang_under_test import SGLANG_PYTHON

from relax_hpc.trainer.models.hf_files import SINGLE

pytestmark = [
    pytest.mark.long, pytest.mark.sglang,
    pytest.mark.skipif(not SGLANG_PYTHON, reason="needs SGLang"),
]  # fmt: skip

APART = 1e-2  # nats, as far as other weights may be at least


@pytest.fixture(scope="module", params=["vl", "vl-moe", "omni"])
def towers(tmp_path_factory, request):
    """Three checkpoints that differ in one of their towers, or in their experts, alone."""
    folders = [tmp_path_factory.mktemp(f"tower{number}") for number in range(3)]
    first = make(folders[0], kind=request.param)
    for seed, folder in enumerate(folders[1:], start=6):
        make(folder, kind=request.param, seed=seed, like=first)
    return [(Hearer if request.param == "omni" else Seer)(folder) for folder in folders]


def shown(seer, folder, number):
    if isinstance(seer, Hearer):
        return seer.prompt(AUDIO + "what?", sound(folder, number))
    return seer.prompt(IMAGE + "what?", source(folder, number))


@pytest.fixture(scope="module")
def shared(towers, tmp_path_factory):
    folders = [seer.folder for seer in towers]
    with house_of("sglang", folders, tmp_path_factory.mktemp("sees"), count=1) as house:
        yield house


transports = pytest.mark.parametrize("transport", ["collective", "files"])


@transports
def test_an_image_is_seen_by_the_tower_that_came_last(house, towers, tmp_path, transport):
    """While requests run, and also where nothing but the tower has changed."""
    house.announce(transport)
    seer = towers[0]
    seer.process = house.engines[0]
    prompts = [
        shown(seer, tmp_path, 1),
        seer.prompt(IMAGE + "in" + VIDEO + "?", source(tmp_path, 2), clip(tmp_path, 10)),
    ]
    if isinstance(seer, Hearer):
        two = source(tmp_path, 2), sound(tmp_path, 3, 0.4)
        prompts[1] = seer.prompt(IMAGE + "and" + AUDIO + "?", *two)
    over = threading.Event()

    def load():
        while not over.is_set():
            ask(seer, prompts, new=40)

    with trainer(house) as ranks, ThreadPoolExecutor(1) as pool:
        loading = pool.submit(load)
        try:
            for version in range(4):
                done = publish(ranks, house, version, check=True)
                assert (done["members"], done["again"]) == (house.ids, False)
                assert done["verified"]["equal"], done["verified"]
                for prompt, made in zip(prompts, ask(seer, prompts), strict=True):
                    assert {held for _, held in made.version_runs} == {version}
                    assert_seen_by(towers, version, prompt, made)
        finally:
            over.set()
        loading.result()


def test_frozen_parts_are_sent_to_an_engine_once(house, towers, tmp_path):
    """After the first update only what learns travels: here a tower, or all but the tower.

    An engine that comes later is given everything, and a check sends everything.
    """
    seer = towers[0]
    seer.process = house.engines[0]
    prompt = shown(seer, tmp_path, 4)
    tensors = load_file(seer.folder / SINGLE)
    hears = isinstance(seer, Hearer)
    everything = sum(
        tensor.nbytes for name, tensor in tensors.items() if not hears or "thinker." in name
    )
    part = "audio_tower" if hears else "visual"
    tower = sum(tensor.nbytes for name, tensor in tensors.items() if part in name)
    has_experts = any(".experts." in name for name in tensors)
    if hears:
        learning, frozen = tower, ["language", "vision", "vision_projection"]
    elif has_experts:
        learning, frozen = everything - tower, ["vision", "vision_projection"]
    else:
        learning, frozen = tower, ["language"]
    with trainer(house, frozen=frozen) as ranks:
        for version, (num_bytes, check) in enumerate(
            [(everything, False), (learning, False), (everything, True), (learning, False)]
        ):
            done = publish(ranks, house, version, check=check)
            assert (done["members"], done["num_bytes"]) == (house.ids, num_bytes)
            assert not check or done["verified"]["equal"]
            [made] = ask(seer, [prompt])
            assert_seen_by(towers, version, prompt, made)
        house.announce()
        done = publish(ranks, house, 4)
        assert (done["members"], done["num_bytes"]) == (house.ids, everything)
        assert publish(ranks, house, 5)["num_bytes"] == learning


def assert_seen_by(towers, version, prompt, made):
    found = torch.tensor(made.logprobs)
    new, old = (towers[v % 3].logprobs(prompt, made.token_ids) for v in (version, version + 2))
    assert (found - new).abs().max() <= TOLERANCE
    assert (found - old).abs().max() > APART
