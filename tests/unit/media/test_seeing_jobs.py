"""Jobs with a model that sees: parts of them that cannot be are refused by name."""

import json
from types import SimpleNamespace

import pytest
from media_files import model_folder
from roles.role_fakes import config

from relax_hpc.config.hf_config import ConfigJson
from relax_hpc.errors import ConfigError
from relax_hpc.roles.sft import document_check
from relax_hpc.roles.training import check

SEES = SimpleNamespace(vision=object(), vocab_size=8, model_type="qwen3_vl", is_window=False,
    max_positions=64,
)  # fmt: skip
FACTS = SimpleNamespace(
    shape=SEES, check_weights=lambda _: None, tokens=lambda _: {}, architecture=lambda _: SEES,
    config=ConfigJson,
)  # fmt: skip


@pytest.fixture
def models(tmp_path, monkeypatch):
    """Two folders of one preprocessor, one of another, one of text; weights are not looked at."""
    monkeypatch.setattr(check, "check_model", lambda *_: SEES)
    made = [model_folder(tmp_path / name, "qwen3_vl") for name in ("policy", "same", "other")]
    rules = made[2] / "preprocessor_config.json"
    rules.write_text(json.dumps(json.loads(rules.read_text()) | {"patch_size": 14}))
    text = tmp_path / "text"
    text.mkdir()
    (text / "config.json").write_text('{"model_type": "qwen3"}')
    return dict(zip(("policy", "same", "other", "text"), map(str, [*made, text]), strict=True))


def teacher(models, name, **more):
    return config(
        model__path=models["policy"], teachers={"t": {"path": models[name], **more}},
        algorithm={"preset": "distill"},
    )  # fmt: skip


@pytest.mark.parametrize("name", ["other", "text"])
def test_a_model_that_would_be_shown_other_pixels_scores_nothing(models, name):
    own = config(model__path=models["policy"], reference={"placement": "own", "path": models[name]})
    with pytest.raises(ConfigError, match=r"reference\.path = .*its images are made otherwise"):
        check.check_reference(own, FACTS)
    with pytest.raises(ConfigError, match=r"teachers\.t\.path = .*its images are made otherwise"):
        check.check_teachers(teacher(models, name), FACTS)


def test_one_of_the_same_preprocessor_does_unless_it_has_prompts_of_its_own(models):
    own = config(
        model__path=models["policy"], reference={"placement": "own", "path": models["same"]}
    )
    check.check_reference(own, FACTS)
    check.check_teachers(teacher(models, "same"), FACTS)
    with pytest.raises(ConfigError, match=r"teachers\.t\.prompt: has no media, and model\.path"):
        check.check_teachers(teacher(models, "same", prompt="{prompt} {answer}"), FACTS)


def test_a_critic_and_documents_are_of_text(models):
    run = config(model__path=models["policy"], algorithm={"preset": "ppo"}, critic={})
    with pytest.raises(ConfigError, match=r"critic: is shown no media, and model\.path"):
        check.check_critic(run, FACTS)
    with pytest.raises(ConfigError, match=r"qwen3_vl', which sees, and documents have no media"):
        document_check.check_model(run, SEES)
