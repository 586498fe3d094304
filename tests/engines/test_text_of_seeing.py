"""Text in a model that sees costs what it does in one that does not, and is the same, bitwise."""

import json
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from seen_rows import make
from trainers import collect, equal, job, opened, trajectories

from relax_hpc.cli.demo import models as seeing
from relax_hpc.trainer.models.hf_files import SINGLE

SEES, READS = "model.language_model.", "model."


def twins(folder):
    """Folders of a model that sees, and of its language model alone."""
    sees, reads = folder / "sees", folder / "reads"
    make(sees)
    reads.mkdir()
    config = json.loads((sees / "config.json").read_text())
    rope = {"rope_type": "default", "rope_theta": 1e4}
    tied = {"tie_word_embeddings": config["tie_word_embeddings"]}
    kind = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "rope_parameters": rope}
    (reads / "config.json").write_text(json.dumps(config["text_config"] | kind | tied))
    tensors = {
        name.replace(SEES, READS): tensor
        for name, tensor in load_file(sees / SINGLE).items()
        if not name.startswith("model.visual.")
    }
    save_file(tensors, reads / SINGLE, metadata={"format": "pt"})
    return SimpleNamespace(sees=sees, reads=reads)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return twins(tmp_path_factory.mktemp("twins"))


def test_logprobs_gradients_and_updates_are_bitwise_those_of_the_language_model(ranks, models):
    rows, advantages = trajectories(12, longest=40)
    batch, found = {"rows": rows, "advantages": advantages}, []
    for folder in (models.reads, models.sees):
        pool = opened(ranks, folder, budget=90)
        logprobs = collect(pool.logprobs(rows=rows))
        [gradients] = pool.gradients(**batch)
        opened(ranks, folder, budget=90)
        pool.train(**batch, num_steps=2)
        [weights] = pool.weights()
        found.append((logprobs, gradients, weights))
    (theirs, *of_language), (mine, *of_both) = found
    assert equal(mine, theirs)
    for language, both in zip(of_language, of_both, strict=True):
        own = {name.replace(SEES, READS): each for name, each in both.items()}
        assert len(language) > 50
        assert equal({name: own[name] for name in language}, language)


@pytest.mark.soak
def test_a_step_takes_as_long(ranks, tmp_path):
    """Larger ones, so that products take most of the time; the towers are frozen."""
    larger = {"hidden_size": 256, "intermediate_size": 768, "head_dim": 64}
    with (
        patch.dict(seeing.TEXT, larger, rope_parameters={
            **seeing.TEXT["rope_parameters"], "mrope_section": [12, 10, 10]}),
        patch.dict(seeing.VISION, out_hidden_size=256),
    ):  # fmt: skip
        models = twins(tmp_path)
    rows, advantages = trajectories(24, longest=60)
    frozen = {"frozen": ["vision", "vision_projection"]}
    configs = [
        job(models.reads, budget=512),
        job(models.sees, budget=512, actor=frozen),
        job(models.reads, budget=512),
    ]
    pool, batch = ranks[1], {"rows": rows, "advantages": advantages}
    pool.open_trainers(configs=configs)
    pool.seconds(**batch, repeats=2)  # the first ones make what is kept
    rounds = [pool.seconds(**batch, repeats=10)[0] for _ in range(6)]
    taken = np.median(np.concatenate(rounds, axis=1), axis=1)
    for name, of in zip(("sees", "reads, a second one"), taken[1:], strict=True):
        clock, thread = of / taken[0]
        print(f"\n{name}: {clock:.4f} by the clock, {thread:.4f} by the thread", end="")
    print(f"; a step takes {taken[0, 0]:.3f} s")
    assert taken[1, 1] < 1.01 * max(taken[0, 1], taken[2, 1])
