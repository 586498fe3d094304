"""`relax-hpc eval`: what it refuses before anything starts, and the table of what a run keeps."""

from pathlib import Path

import pytest

from relax_hpc.errors import ConfigError
from relax_hpc.launch.evaluate import EvaluationRequest, job_of
from relax_hpc.roles.rollout.heldout import Due, HeldoutRow, ScoreBoard, TaskScore
from relax_hpc.runs import evaluations
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.telemetry.events import EventWriter

SET = ("--set", "heldout=heldout.jsonl")
REFUSED = {
    ("model",): "no set of prompts is named; add --set NAME=FILE, or --job with [eval]",
    ("nothing", *SET): "nothing: is no run (run.json, there or under runs/) and no model (config.",
    ("model", *SET, "--k", "1,5", "--samples", "4"): "heldout: k = 5: there are 4 samples of a",
    ("model", "--set", "model.dtype=float32"): "is --key model.dtype=float32",
    ("model", *SET, "--key", "rollout.max_new_tokens=99999999"): "positions; use ",
    ("model", "--job", "wide.toml"): "engines.rollout.nodes_per_engine = 2: relax-hpc eval starts",
    ("runs/old", "--samples", "4"): "--samples: runs/old is a run, whose samples are there; leave",
    ("model", *SET, "--name", "old"): "--name old: ",
}


@pytest.mark.parametrize("arguments", REFUSED, ids=" ".join)
def test_what_cannot_be_evaluated_is_refused_in_a_line(job, refused, arguments):
    old = Path("runs/old")
    old.mkdir(parents=True)
    more = '[engines.rollout]\nkind = "sglang"\nnodes_per_engine = 2\nresources.nodes = 2\n'
    Path("wide.toml").write_text(
        Path("job.toml").read_text(encoding="utf-8") + more, encoding="utf-8"
    )
    other = job_of(EvaluationRequest(Path("model"), sets={"other": "heldout.jsonl"}, name="old"))
    (old / "run.json").write_text(other.model_dump_json())
    said = refused("eval", *arguments)
    assert REFUSED[arguments] in said and "\n" not in said and len(said) < 500


def test_an_evaluation_has_what_a_job_says_of_sampling_and_nothing_of_training(job):
    text = Path("job.toml").read_text(encoding="utf-8")
    text = text.replace("[schedule]", "[schedule]\nmax_staleness = 0")
    pool = '[engines.rollout]\ncount = 4\nengines_per_task = 2\nplacement = "actor"\n'
    text += f'[reward]\nname = "coin"\n{pool}[actor.layout]\ndata_parallel = 4\n'
    Path("job.toml").write_text(text, encoding="utf-8")
    sampling = {"samples_per_prompt": 4, "temperature": 0.8}
    asked = EvaluationRequest(
        Path("model"), Path("job.toml"), {"more": "train.jsonl"}, sampling, name="try"
    )
    config = job_of(asked)
    assert (config.name, config.run_dir) == ("try", Path("runs/try").absolute())
    assert config.reward.name == "coin"
    pool = config.rollout_pool
    assert (pool.placement, pool.count, pool.num_hosts) == ("own", 2, 1)
    heldout, more = config.eval.values()
    assert (heldout.num_prompts, heldout.samples_per_prompt, heldout.temperature) == (256, 4, 0.8)
    assert more.path == [Path("train.jsonl").absolute()] and more.num_prompts > 10**9
    assert config.prompts.train == heldout.path and config.actor.layout.world_size == 1


def boxed(answer):
    return f"I see. \\boxed{{{answer}}}"


class Made:
    """A run of two rollout tasks, each of which scores the prompts of its parity."""

    def __init__(self, root):
        self.root, self.paths = root, RunPaths(root)
        root.mkdir(parents=True)
        (root / "run.json").write_text("{}")

    def evaluate(self, due, version, answers, *, rank=0, right="7", finish="stop"):
        """Keeps samples of `answers` by prompt, as a task does."""
        rows = [
            HeldoutRow(
                prompt, sample, float(answer == right), {}, version, version, finish, 3,
                [boxed(answer)], "even" if prompt % 4 == 0 else "odd",
            )
            for prompt, said in answers.items()
            for sample, answer in enumerate(said)
        ]  # fmt: skip
        share = TaskScore.of(rows)
        with EventWriter(self.paths.events("rollout", rank), "rollout", rank) as events:
            events.emit("eval", headline=True, tasks=2, **due._asdict(), **share._asdict())
        ScoreBoard(self.paths, rank, 2).add(due, share, rows)


BEFORE, DURING = Due("h", "before", 0), Due("h", "during", 1)


@pytest.fixture
def made(tmp_path):
    made = Made(tmp_path / "runs" / "try")
    made.evaluate(BEFORE, 0, {0: "7711", 2: "1223"})
    made.evaluate(BEFORE, 0, {1: "7777"}, rank=1, finish="length")
    made.evaluate(DURING, 21, {1: "7777"}, rank=1)
    made.evaluate(DURING, 20, {0: "7771", 2: "7723"})
    return made


def test_shares_of_tasks_are_one_evaluation_though_their_policies_differ(made):
    before, during = evaluations.collect(made.root)
    assert (before.when, before.version, before.version_max) == ("before", 0, 0)
    assert (during.when, during.version, during.version_max) == ("during", 20, 21)
    assert (before.all.num_prompts, before.all.num_samples) == (3, 12)
    assert before.all.mean.value == pytest.approx(6 / 12)
    assert before.all.truncated.value == pytest.approx(4 / 12)
    assert list(before.all.pass_at) == [1, 4]
    passed = before.all.pass_at[4].value, before.all.pass_all[4].value
    assert passed == pytest.approx((2 / 3, 1 / 3))
    assert before.all.majority_at[4].value == pytest.approx((1 / 2 + 0 + 1) / 3)
    assert before.subsets["even"].mean.value == 0.5 and before.subsets["odd"].num_prompts == 2
    assert before.missing_tasks == 0


def test_what_a_task_did_again_counts_once_and_its_newest_try(made):
    made.evaluate(DURING, 22, {0: "7777", 2: "7777"})
    [_, during] = evaluations.collect(made.root)
    assert (during.version, during.version_max, during.all.num_samples) == (21, 22, 12)
    assert during.all.mean.value == 1.0


def test_a_task_that_has_not_told_its_share_is_said_to_be_missing(made):
    for path in (made.paths.events("rollout", rank) for rank in range(2)):
        path.write_text(path.read_text().replace('"tasks": 2', '"tasks": 4'))
    [before, _] = evaluations.collect(made.root)
    assert before.missing_tasks == 2


def test_samples_that_are_not_there_yet_are_said_to_be_missing(made):
    made.paths.eval_rows("h", 21, "during", 1, 1).unlink()
    [_, during] = evaluations.collect(made.root)
    assert (during.missing_tasks, during.all.num_prompts) == (1, 2)
    assert "tasks whose samples are missing: 1" in evaluations.text([during])


def test_mistakes_are_named(made):
    with pytest.raises(ConfigError, match=r"h, before: prompt 0: k = 5: there are 4 samples"):
        evaluations.collect(made.root, ks=[1, 5])
    with pytest.raises(ConfigError, match=r"--set hard: no evaluation .* there are: h"):
        evaluations.collect(made.root, name="hard")
    path = made.paths.eval_rows("h", 0, "before", 0, 0)
    whole = path.read_text()
    path.write_text(whole + '{"prompt": 3')
    with pytest.raises(ConfigError, match=r"000000-before-0.0.jsonl, line 9: is no sample"):
        evaluations.collect(made.root)


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (boxed(7) + boxed("8.0"), "8"),
        (boxed(r"\frac{1}{2}"), "1/2"),
        ("Answer: 3 " + boxed(4), "4"),
        (f"<think>{boxed(1)}</think>{boxed(2)}", "2"),
        (f"<think>{boxed(1)}", None),
    ],
)
def test_the_answer_that_a_response_votes_for(response, answer):
    assert evaluations.final_answer(response) == answer
