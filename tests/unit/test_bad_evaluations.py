"""What `relax-hpc eval` refuses before an engine is started, or a folder made."""

import json
from pathlib import Path

import pytest

from relax_hpc.errors import ConfigError
from relax_hpc.launch.evaluate import Asked, job_of

SET = ("--set", "heldout=heldout.jsonl")
REFUSED = {
    ("model",): "no set of prompts is named; add --set NAME=FILE, or --job with [eval]",
    ("nothing", *SET): "nothing: is no run (run.json, there or under runs/) and no model (config.",
    ("model", "--set", "heldout"): "--set heldout: of a model, name a file too: NAME=FILE",
    ("model", *SET, "--set", "heldout=x"): "--set heldout=x: there are two of that name",
    ("model", "--set", "a/b=heldout.jsonl"): "eval.a/b",
    ("model", "--set", "=heldout.jsonl"): "--set =heldout.jsonl: of a model, name a file too",
    ("model", "--set", "h=none.jsonl"): "eval.h.path: ",
    ("model", *SET, "--k", "1,5", "--samples", "4"): "heldout: k = 5: there are 4 samples of a",
    ("model", *SET, "--samples", "4"): "eval.heldout.samples_per_prompt = 4: are all alike, since",
    ("model", "--set", "model.dtype=float32"): "is --key model.dtype=float32",
    ("model", *SET, "--k", "two"): "--k two: is no list of numbers; write --k 1,4",
    ("model", *SET, "--samples", "0"): "eval.heldout.samples_per_prompt = 0: ",
    ("model", *SET, "--top-p", "1.5"): "eval.heldout.top_p = 1.5: ",
    ("model", *SET, "--temperature", "-1.0"): "eval.heldout.temperature = -1.0: ",
    ("model", *SET, "--reward", "boxed_nimber"): "boxed_nimber",
    ("model", *SET, "--key", "rollout.max_tokens=8"): "rollout.max_tokens = 8: unknown key",
    ("model", *SET, "--key", "eval.heldout.stop=['']"): "eval.heldout.stop.0 = '': ",
    ("model", *SET, "--key", "rollout.max_new_tokens=99999999"): "positions; use ",
    ("model", "--job", "none.toml"): "none.toml",
    ("model", "--job", "sft.toml"): "sft.toml: a job with [sft] samples nothing; name one of",
    ("model", "--job", "wide.toml"): "engines.rollout.nodes_per_engine = 2: relax-hpc eval starts",
    ("runs/old", "--samples", "4"): "--samples: runs/old is a run, whose samples are there; leave",
    ("runs/old", "--key", "seed=1"): "--key: runs/old is a run, whose samples are there; leave",
    ("old", "--set", "h=x"): "--set h=x: no evaluation of it is in runs/old; there are: none yet",
    ("model", *SET, "--name", "old"): "--name old: ",
}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ('""', "eval..[key] = ''"),
        ('"a/b"', "eval.a/b.[key] = 'a/b'"),
        ("heldout", "Cannot declare ('eval', 'heldout') twice"),
    ],
)
def test_a_set_of_a_job_without_a_name_or_with_that_of_another_is_refused(job, refused, name, said):
    with Path("job.toml").open("a") as file:
        file.write(f'[eval.{name}]\npath = "heldout.jsonl"\n')
    answer = refused("submit", "job.toml", "--local")
    assert said in answer and "\n" not in answer


@pytest.mark.parametrize("arguments", REFUSED, ids=" ".join)
def test_what_cannot_be_evaluated_is_refused_in_a_line(job, refused, arguments):
    old = Path("runs/old")
    old.mkdir(parents=True)
    Path("sft.toml").write_text(
        'name = "s"\nmodel.path = "model"\nsft = {train = "t", batch_size = 1, num_steps = 1}\n'
    )
    more = '[engines.rollout]\nkind = "sglang"\nnodes_per_engine = 2\nresources.nodes = 2\n'
    Path("wide.toml").write_text(Path("job.toml").read_text() + more)
    other = job_of(Asked(Path("model"), sets={"other": "heldout.jsonl"}, name="old"))
    (old / "run.json").write_text(other.model_dump_json())
    said = refused("eval", *arguments)
    assert REFUSED[arguments] in said and "\n" not in said and len(said) < 500


def test_an_evaluation_has_what_a_job_says_of_sampling_and_nothing_of_training(job):
    own = """
[reward]
name = "coin"
[engines.rollout]
count = 4
engines_per_task = 2
placement = "actor"
resources.cpus_per_task = 3
[engines.judge]
max_running_requests = 8
[actor]
resources.nodes = 2
[actor.layout]
data_parallel = 4
"""
    text = Path("job.toml").read_text().replace("[schedule]", "[schedule]\nmax_staleness = 0")
    Path("job.toml").write_text(text + own)
    asked = Asked(
        Path("model"), Path("job.toml"), {"more": "train.jsonl"},
        {"samples_per_prompt": 4, "temperature": 0.8}, ["rollout.max_new_tokens=9"], "try",
    )  # fmt: skip
    config = job_of(asked)
    assert (config.name, config.run_dir) == ("try", Path("runs/try").absolute())
    assert (config.reward.name, config.rollout.max_new_tokens) == ("coin", 9)
    pool = config.rollout_pool
    assert (pool.placement, pool.count, pool.num_hosts) == ("own", 2, 1)
    assert pool.resources.cpus_per_task is None and list(config.engines) == ["rollout", "judge"]
    heldout, more = config.eval.values()
    assert (heldout.num_prompts, heldout.samples_per_prompt, heldout.temperature) == (256, 4, 0.8)
    assert more.path == [Path("train.jsonl").absolute()] and more.num_prompts > 10**9
    assert config.prompts.train == heldout.path and config.actor.layout.world_size == 1


def test_a_job_is_that_of_its_model_argument_and_its_name_says_so(job):
    config = job_of(Asked(Path("model"), sets={"h": "heldout.jsonl"}))
    assert config.name.startswith("eval-model-2")
    with pytest.raises(ConfigError, match=r"job.toml: .*name"):
        Path("job.toml").write_text(Path("job.toml").read_text().replace("name =", "nam ="))
        job_of(Asked(Path("model"), Path("job.toml")))
    assert json.loads(config.model_dump_json())["model"]["path"] == str(Path("model").absolute())
