"""Which folders `convert` takes and where it writes, and what a made model consists of."""

from functools import partial
from types import SimpleNamespace

import pytest
from role_fakes import Journal, config

from relax_hpc.cli.demo import make_tiny
from relax_hpc.errors import ConfigError
from relax_hpc.runtime.files.records import read_json
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.trainer.checkpoints import convert as module
from relax_hpc.trainer.checkpoints.convert import convert
from relax_hpc.trainer.megatron.checkpoint_files import MANIFEST


@pytest.fixture
def journal(monkeypatch):
    noted = Journal()
    for name, said in (("to_hf", "hf"), ("to_megatron", "megatron")):
        monkeypatch.setattr(module, name, partial(noted.note, said))
    return noted


@pytest.fixture
def run(tmp_path):
    paths = RunPaths(tmp_path / "run")
    for step in (3, 6):
        (paths.checkpoints / f"step_{step:08d}").mkdir(parents=True)
        (paths.checkpoints / f"step_{step:08d}" / MANIFEST).write_text("")
    settings = config(model__path=str(tmp_path / "model"))
    paths.config.write_text(settings.model_dump_json())
    return paths


def test_of_a_run_the_newest_checkpoint_or_a_step_goes_to_its_own_folder(run, journal, tmp_path):
    settings = {"out": None, "model": None}
    assert convert(run.root, "hf", step=None, **settings) == run.hf(6)
    assert convert(run.root, "hf", step=3, **settings) == run.hf(3)
    assert journal == [
        ("hf", run.checkpoints / f"step_{step:08d}", tmp_path / "model", run.hf(step))
        for step in (6, 3)
    ]
    with pytest.raises(ConfigError, match="no checkpoint of step 4; there are 3, 6"):
        convert(run.root, "hf", step=4, **settings)


def test_a_checkpoint_knows_its_run_and_the_given_model_and_folder_come_first(
    run, journal, tmp_path
):
    folder, out = run.checkpoints / "step_00000003", tmp_path / "out"
    convert(folder, "hf", out=out, step=None, model=tmp_path / "other")
    convert(folder, "hf", out=None, step=None, model=None)
    assert journal == [
        ("hf", folder, tmp_path / "other", out),
        ("hf", folder, tmp_path / "model", run.hf(3)),
    ]
    with pytest.raises(ConfigError, match="--step chooses among those of a run"):
        convert(folder, "hf", out=out, step=3, model=None)


def test_a_folder_of_transformers_becomes_a_checkpoint_where_nothing_is_yet(journal, tmp_path):
    what, out = tmp_path / "what", tmp_path / "out"
    what.mkdir()
    (what / "config.json").write_text("{}")
    assert convert(what, "megatron", out=out, step=None, model=None) == out
    assert journal == [("megatron", what, out)]
    out.mkdir()
    with pytest.raises(ConfigError, match="is there already"):
        convert(what, "megatron", out=out, step=None, model=None)


def test_a_model_is_warmed_up_on_its_prompts_and_scored_on_the_held_out_ones(tmp_path, monkeypatch):
    journal = Journal()

    def warm_start(model, train, heldout, **settings):
        journal.note(model, len(train), len(heldout), settings)
        example = train[0]
        answer = tokens.decode(example.response_ids[:-1])
        assert answer.startswith(r"\boxed{") and answer.endswith("}")
        assert example.response_ids[-1] == tokens.eos_token_id
        assert not any(each in train for each in heldout)
        return SimpleNamespace(_asdict=lambda: {"steps": 5})

    tokens = make_tiny.models.tokenizer()
    saved = []
    monkeypatch.setattr(make_tiny, "NUM_TRAIN", 20)
    monkeypatch.setattr(make_tiny, "NUM_HELDOUT", 12)
    monkeypatch.setattr(make_tiny, "NUM_SCORED", 8)
    monkeypatch.setattr(make_tiny, "warm_start", warm_start)
    monkeypatch.setattr(make_tiny.models, "model", lambda tokens, seed: f"model {seed}")
    save = lambda folder, model, tokens: saved.append((folder.name, len(journal)))  # noqa: E731
    monkeypatch.setattr(make_tiny.models, "save", save)
    made = make_tiny.make(tmp_path, seed=4, target=0.3, progress=print)
    assert journal == [("model 4", 20, 8, {"target": 0.3, "seed": 4, "progress": print})]
    assert saved == [("untrained", 0), ("model", 1)]  # the one before, the other after it
    assert made == read_json(tmp_path / "made.json")
    assert made["steps"] == 5 and made["settings"]["seed"] == 4
    assert make_tiny.make(tmp_path, seed=4, target=0.3, progress=print) == made
    assert len(journal) == 1
    make_tiny.make(tmp_path, seed=5, target=0.3, progress=print)
    assert len(journal) == 2
