import json
import shutil
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from relax_hpc.cli.demo import make_tiny, models, tasks
from relax_hpc.cli.demo.warm_start import Example, _loss, accuracy, warm_start
from relax_hpc.config.prompts import PromptsConfig
from relax_hpc.data import tokenizer
from relax_hpc.data.records import Records
from relax_hpc.environments.rewards.functions import code
from relax_hpc.environments.rewards.sandbox import ProgramLimits, run

PROMPT = [{"role": "user", "content": "17+58="}]


@pytest.fixture(scope="module")
def tokens():
    return models.tokenizer()


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokens):
    folder = tmp_path_factory.mktemp("model")
    models.save(folder, models.model(tokens, seed=0), tokens)
    return folder


@pytest.mark.parametrize(
    "text",
    [
        "",
        "17+58=75",
        "\\boxed{75}<|im_end|>",
        "user\nassistant\n",
        "a  b\t\r\n",
        "é漢🙂",
        "\x00\x7f",
    ],
)
def test_every_text_round_trips_through_the_saved_tokenizer(folder, text):
    loaded = tokenizer.load(folder)
    assert loaded.decode(loaded.encode(text)) == text


def test_a_prompt_of_the_task_is_twelve_tokens_and_its_answer_five(folder):
    loaded = tokenizer.load(folder)
    text = loaded.apply_chat_template(PROMPT, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\n17+58=<|im_end|>\n<|im_start|>assistant\n"
    assert len(loaded.encode(text)) == 12
    assert len(loaded.encode("\\boxed{75}<|im_end|>")) == 5


@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_moe", "llama"])
@pytest.mark.parametrize(
    "name", ["TokenizersBackend", "PreTrainedTokenizerFast", "Qwen2Tokenizer", "Qwen2TokenizerFast"]
)
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


def test_a_task_that_only_needs_the_tokenizer_imports_no_torch(folder):
    program = (
        "import sys; from pathlib import Path; from relax_hpc.data import tokenizer\n"
        "tokens = tokenizer.load(Path(sys.argv[1]))\n"
        "message = {'role': 'user', 'content': '17+58='}\n"
        "tokens.decode(tokens.apply_chat_template([message], return_dict=True)['input_ids'])\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program, folder], timeout=60).returncode == 0


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


def test_weights_come_from_the_seed_and_leave_the_global_stream_alone(tokens):
    state = torch.get_rng_state()
    weights = [models.model(tokens, seed=s).lm_head.weight for s in (0, 0, 1)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert torch.equal(torch.get_rng_state(), state)


def test_the_loss_of_unequal_rows_is_the_mean_over_response_tokens(tokens):
    model = models.model(tokens, seed=0)
    rows = [Example([1, 2, 3], [4, 5]), Example([6], [7, 8, 9, 10])]
    total = 0.0
    for prompt, response, _ in rows:  # each alone, unpadded, from all logits
        logits = model(torch.tensor([prompt + response])).logits[0].log_softmax(-1)
        for k, token in enumerate(response):
            total -= logits[len(prompt) + k - 1, token].item()
    assert _loss(model, rows).item() == pytest.approx(total / 6, rel=1e-5)


def test_accuracy_counts_whole_answers_also_for_prompts_of_unequal_length(tokens):
    model = models.model(tokens, seed=0)
    right = []
    for prompt in ([1, 2, 3], [4, 5], [6, 7]):
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=ids * 0 + 1, max_new_tokens=3, do_sample=False,
                             eos_token_id=None)  # fmt: skip
        right.append(Example(prompt, out[0, len(prompt) :].tolist()))
    assert accuracy(model, right) == 1.0
    last = right[2].response_ids
    wrong = Example(right[2].prompt_ids, [*last[:-1], (last[-1] + 1) % 320])
    assert accuracy(model, [right[0], right[1], wrong, wrong]) == 0.5


def test_a_warm_start_learns_is_repeatable_and_stops_at_its_target(tokens):
    examples = [Example([10 + i, 3], [50 + i, 2]) for i in range(8)]  # eight facts to memorise

    def run(seed):
        model = models.model(tokens, seed=0)
        said = []
        outcome = warm_start(model, examples, examples, target=0.9, seed=seed,
                             progress=said.append, batch_size=8, warmup_steps=5, eval_every=10,
                             max_steps=200)  # fmt: skip
        return outcome, said, model.lm_head.weight

    (a, said, weights), (b, _, again), (_, _, other) = run(0), run(0), run(1)
    assert a.greedy >= 0.9
    assert a.steps < 200
    assert said[-1].endswith(f"held-out {a.greedy:.3f}")
    assert (a.steps, a.greedy, a.sampled) == (b.steps, b.greedy, b.sampled)
    assert torch.equal(weights, again)
    assert not torch.equal(weights, other)


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


def test_prompts_are_there_once_and_the_tests_are_those_of_their_numbers(rows):
    asked = [row.prompt[0]["content"] for part in rows.values() for row in part]
    assert len(asked) == len(set(asked)) == 48 and len(rows["heldout"]) == 8
    for row in rows["heldout"]:
        factor, term = map(int, row.prompt[0]["content"].split("n+"))
        tests = json.loads(row.answer)
        assert [factor * int(n) + term for n in tests["inputs"]] == list(map(int, tests["outputs"]))


def test_a_program_is_few_tokens(rows):
    tokens = models.tokenizer(words=[*models.WORDS, *tasks.WORDS])
    assert len(tokens) <= models.VOCAB_SIZE
    longest = max(len(tokens.encode(row.metadata["completion"])) for row in rows["train"])
    assert longest + 1 <= 11  # with the end of the turn
