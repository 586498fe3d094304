"""Numbers beyond their types, and values that are none: in the file, and by --set."""

import math

import pytest

from relax_hpc.config.run import RunConfig
from relax_hpc.config.sft import SftRunConfig
from relax_hpc.errors import ConfigError, shown
from relax_hpc.job_file import load, validate

NINES = "9" * 20
VALUES = {
    f"seed={NINES}": f"seed = {NINES}: input should be less than or equal to 2147483647",
    "seed=-1": "seed = -1: input should be greater than or equal to 0",
    f"schedule.num_steps={NINES}": "should be less than or equal to 2147483647",
    "schedule.num_steps=true": "schedule.num_steps = True: input should be a valid integer",
    "schedule.num_steps=5.0": "schedule.num_steps = 5.0: input should be a valid integer",
    "schedule.num_steps='5'": "schedule.num_steps = '5': input should be a valid integer",
    "schedule.num_steps=0x" + "f" * 5000: "schedule.num_steps = a number of 20000 bits: input",
    "schedule.num_steps=" + "9" * 5000: "schedule.num_steps = '9999",
    f"weights.bucket_bytes={NINES}": "should be less than or equal to 9223372036854775807",
    f"launch.peer_timeout_s={NINES}": "should be less than or equal to 2147483647",
    "actor.optimizer.lr=inf": "actor.optimizer.lr = inf: input should be a finite number",
    "actor.optimizer.lr=nan": "actor.optimizer.lr = nan: input should be a finite number",
    "actor.optimizer.lr=1e39": "lr = 1e+39: input should be less than or equal to 34000",
    "actor.optimizer.lr=true": "actor.optimizer.lr = True: input should be a valid number",
    "actor.optimizer.clip_grad=inf": "clip_grad = inf: input should be a finite number",
    "algorithm.correction.cap=inf": "correction.cap = inf: input should be a finite number",
    "algorithm.kl.coefficient=nan": "kl.coefficient = nan: input should be a finite number",
    "rollout.temperature=inf": "rollout.temperature = inf: input should be a finite number",
    "actor.optimizer.weight_decay=inf": "weight_decay = inf: input should be a finite number",
    "engines.rollout.args.x=-inf": "args.x = -inf: a finite number is expected",
    "engines.rollout.args.x=[1, [nan]]": "args.x = [1, [nan]]: a finite number is expected",
    f"engines.rollout.args.x={NINES}": f"args.x = {NINES}: has more than 64 bits; use",
    "actor.transformer.x=inf": "actor.transformer.x = inf: a finite number is expected",
    "actor.optimizer.megatron.adam_eps=nan": "megatron.adam_eps = nan: a finite number",
    "engines.rollout.args.x=2024-01-01": "is a date or a time; a number, a string, true, false or",
    "algorithm.mini_batches=99": "mini_batches = 99: a batch has schedule.prompts_per_step = 4",
    "model.path=": "model.path = '': is no path; name a file or a folder",
    'prompts.train="a\\u0000b"': "is no path; name a file or a folder",
    "run_root=' '": "run_root = ' ': is no path; name a file or a folder",
    "run_root=$HOME/runs": "run_root = '$HOME/runs': variables are not put in; write the path out",
    f"name={'n' * 300}": "string should have at most 200 characters",
    "name=größe": "name = 'größe': use letters of a to z, digits",
    "rollout.x=1": "rollout.x = 1: unknown key; rollout takes environment, samples",
    "actor.resources.x=1": "actor.resources.x = 1: unknown key; actor.resources takes partition,",
    "actor.lr=1": "actor.lr = 1: unknown key; here it is actor.optimizer.lr",
    "actor.lora.rank=-1": "actor.lora.rank = -1: input should be greater than or equal to 0",
    "actor.lora.alpha=8": "alpha = 8.0: means nothing with rank = 0; set a rank, e.g. 32, or",
    "actor.lora.targets=[]": "actor.lora.targets = []: list should have at least 1 item",
    "actor.lora.targets=['lm_head']": "input should be 'q_proj', 'k_proj', 'v_proj', 'o_proj',",
    "actor.lora.r=8": "actor.lora.r = 8: unknown key; actor.lora takes rank, alpha, targets",
    "actor.lora_rank=8": "actor.lora_rank = 8: unknown key; here it is actor.lora.rank",
    "prompts.lr=1": "unknown key; here it is actor.optimizer.lr or critic.lr",
    "critic.lrx=1": "critic.lrx = 1: unknown key; did you mean critic.lr?",
    "schedule.max_new_tokens=1": "here it is rollout.max_new_tokens or eval.<name>.max_new_tokens",
    'resources.comment="a\\nb"': "comment = 'a\\nb': has a line break or another control character",
    'resources.dependency="\\u001b"': "dependency = '\\x1b': has a line break or another control",
    'actor.resources.account="a\\r"': "actor.resources.account = 'a\\r': has a line break or",
    'actor.resources.mem="1G\\n#SBATCH -N9"': "actor.resources.mem = '1G\\n#SBATCH -N9': has a",
    "resources.nodes=2": "nodes = 2: is of one component; set actor.resources.nodes, or that of an",
    "algorithm..x=1": "--set algorithm..x=1: algorithm..x is no key; write section.key=value",
    "a b=1": "--set a b=1: a b is no key; write section.key=value",
    "name=" + "[" * 5000: "name = '[[[[",
}


@pytest.mark.parametrize("setting", VALUES, ids=lambda setting: setting[:40])
def test_a_value_beyond_its_type_is_refused_where_it_is_set(refused, setting):
    said = refused("submit", "job.toml", "--local", "--set", setting)
    assert VALUES[setting] in said and "\n" not in said and len(said) < 600


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f"seed = {NINES}", "job.toml: seed = 99999999999999999999: input should be less than"),
        ("seed = " + "9" * 5000, "job.toml: is not TOML: Exceeds the limit"),
        ("seed = inf", "job.toml: seed = inf: input should be a valid integer"),
        ("x = " + "[" * 5000, "job.toml: is nested too deeply; jobs/ holds examples"),
        ('name = "again"', "job.toml: is not TOML: Cannot overwrite a value"),
        ("[model]\n[model]", "job.toml: is not TOML: Cannot declare ('model',) twice"),
    ],
    ids=["large", "endless", "infinite", "deep", "key twice", "table twice"],
)
def test_a_job_file_that_holds_one_is_refused(refused, job, line, message):
    text = (job / "job.toml").read_text()
    (job / "job.toml").write_text(f"{'' if line.startswith('[') else line}\n{text}\n{line}\n"
                                  if line.startswith("[") else f"{line}\n{text}")  # fmt: skip
    said = refused("check", "job.toml")
    assert message in said and "\n" not in said


def test_a_job_file_with_a_byte_order_mark_and_windows_line_ends_is_read(job):
    plain = load(job / "job.toml")
    text = (job / "job.toml").read_text().replace("\n", "\r\n")
    (job / "job.toml").write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert load(job / "job.toml") == plain


def fields(section):
    for name, field in section.model_fields.items():
        if hasattr(field.annotation, "model_fields"):
            yield from ((f"{name}.{key}", of) for key, of in fields(field.annotation))
        else:
            yield name, field


@pytest.mark.parametrize("kind", [RunConfig, SftRunConfig])
@pytest.mark.parametrize("value", [math.inf, math.nan, 10**40, -(10**40), 1e300])
def test_no_number_of_a_job_may_be_infinite_or_larger_than_what_computes_with_it(kind, value):
    numbers = [key for key, field in fields(kind)
               if any(kind in str(field.annotation) for kind in ("int", "float"))]  # fmt: skip
    assert len(numbers) > 25
    for key in numbers:
        tree = {"sft": {}} if kind is SftRunConfig else {}
        *sections, last = key.split(".")
        inner = tree
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[last] = value
        with pytest.raises(ConfigError) as error:
            validate(tree, source="job")
        assert f"job: {key} = " in str(error.value), key


def test_a_long_value_is_repeated_in_part():
    assert len(shown("x" * 10_000)) < 100 and len(shown(list(range(10_000)))) < 100
    assert shown(10**5000) == f"a number of {(10**5000).bit_length()} bits"
    assert shown("a\nb") == r"'a\nb'"
