import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from relax_hpc.cli.demo import make_tiny, models, tasks
from relax_hpc.cli.demo.make_tiny import Example, _loss
from relax_hpc.config.prompts import PromptsConfig
from relax_hpc.data import tokenizer
from relax_hpc.data.records import Records
from relax_hpc.environments.rewards.functions import code
from relax_hpc.environments.rewards.sandbox import ProgramLimits, run


@pytest.fixture(scope="module")
def tokens():
    return models.tokenizer()


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokens):
    folder = tmp_path_factory.mktemp("model")
    models.save(folder, models.model(tokens, seed=0), tokens)
    return folder


@pytest.mark.parametrize("text", ["", "\\boxed{75}<|im_end|>", "a  b\t\r\n", "é漢🙂", "\x00\x7f"])
def test_every_text_round_trips_through_the_saved_tokenizer(folder, text):
    loaded = tokenizer.load(folder)
    assert loaded.decode(loaded.encode(text)) == text


@pytest.mark.parametrize("model_type", ["qwen3", "llama"])
@pytest.mark.parametrize("name", ["TokenizersBackend", "Qwen2Tokenizer", "Qwen2TokenizerFast"])
def test_a_tokenizer_is_the_one_that_transformers_chooses(folder, tmp_path, name, model_type):
    stored = shutil.copytree(folder, tmp_path / "model")
    for file, change in (
        ("tokenizer_config.json", {"tokenizer_class": name}),
        ("config.json", {"model_type": model_type}),
    ):
        content = json.loads((stored / file).read_text()) | change
        (stored / file).write_text(json.dumps(content))
    ours, theirs = tokenizer.load(stored), AutoTokenizer.from_pretrained(stored)
    assert type(ours) is type(theirs)
    assert ours.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert ours.chat_template == theirs.chat_template


def test_the_usual_classes_load_the_very_weights_and_the_end_of_turn(folder, tokens):
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    made = models.model(tokens, seed=0)
    for name, weight in made.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight), name
    assert loaded.config.architectures == ["Qwen3ForCausalLM"]
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    end = tokens.convert_tokens_to_ids("<|im_end|>")
    assert GenerationConfig.from_pretrained(folder).eos_token_id == [end]
    assert AutoTokenizer.from_pretrained(folder).eos_token_id == end


def test_the_loss_of_unequal_rows_is_the_mean_over_response_tokens(tokens):
    model = models.model(tokens, seed=0)
    rows = [Example([1, 2, 3], [4, 5]), Example([6], [7, 8, 9, 10])]
    total = 0.0
    for prompt, response, _ in rows:  # each alone, unpadded, from all logits
        logits = model(torch.tensor([prompt + response])).logits[0].log_softmax(-1)
        for k, token in enumerate(response):
            total -= logits[len(prompt) + k - 1, token].item()
    assert _loss(model, rows).item() == pytest.approx(total / 6, rel=1e-5)


def test_a_made_folder_is_complete_and_only_other_settings_make_it_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(make_tiny, "NUM_TRAIN", 64)
    monkeypatch.setattr(make_tiny, "NUM_HELDOUT", 8)
    said: list[str] = []
    made = make_tiny.make(tmp_path, digits=1, target=0.0, progress=said.append)
    assert made["settings"] == {"digits": 1, "seed": 0, "target": 0.0, "format": 2}
    assert json.loads((tmp_path / "made.json").read_text()) == made
    for name in ("model", "untrained"):
        assert AutoModelForCausalLM.from_pretrained(tmp_path / name).config.vocab_size == 320
    assert len((tmp_path / "train.jsonl").read_text().splitlines()) == 64
    (tmp_path / "heldout.jsonl").write_text("untouched")
    assert make_tiny.make(tmp_path, digits=1, target=0.0, progress=said.append) == made
    assert (tmp_path / "heldout.jsonl").read_text() == "untouched"
    make_tiny.make(tmp_path, digits=1, target=0.0, seed=1, progress=said.append)
    assert len((tmp_path / "heldout.jsonl").read_text().splitlines()) == 8


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("programs")
    tasks.write_programs(folder, 40, 8, seed=3)
    found = {}
    for part in ("train", "heldout"):
        settings = PromptsConfig(train=[folder / f"{part}.jsonl"])
        records = Records(settings.mixture, settings)
        found[part] = [records[n] for n in range(len(records))]
    return found


def passes(program, answer):
    limits = ProgramLimits(10.0, 2**30, 2**26)
    tests = code.tests_in(answer)
    return [test.is_passed(run(test.of(program), limits, "limits")) for test in tests]


def test_the_wanted_program_passes_both_tests_and_a_constant_one_of_them_at_most(rows):
    for row in rows["train"][:3]:
        wanted = row.metadata["completion"]
        assert wanted.startswith("```python\n") and wanted.endswith("\n```")
        program = wanted.removeprefix("```python\n").removesuffix("\n```")
        assert passes(program, row.answer) == [True, True]
        first = json.loads(row.answer)["outputs"][0]
        assert passes(f"print({first})", row.answer) == [True, False]
        assert passes(program.replace("+", "-"), row.answer) == [False, False]
