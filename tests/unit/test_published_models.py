"""config.json of models as they were published: read, with the numbers that are known of them."""

import json
import math
from contextlib import nullcontext

import pytest
from job_trees import job_of
from llama_configs import CONFIGS

from relax_hpc.config.hf_config import ConfigJson
from relax_hpc.errors import ConfigError
from relax_hpc.roles.training.check import check_window
from relax_hpc.trainer.megatron.costs import training_flops
from relax_hpc.trainer.models import fields
from relax_hpc.trainer.models.registry import parameters, read_architecture


@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_model_is_read_without_doubts_and_has_its_parameters(tmp_path, name):
    record, expected = CONFIGS[name]
    (tmp_path / "config.json").write_text(json.dumps(record))
    shape = read_architecture(tmp_path)
    assert fields.doubts(ConfigJson(tmp_path)) == []
    made = list(parameters(shape))
    assert sum(math.prod(size) for each in made for size in each.hf.values()) == expected
    assert shape.max_positions == record["max_position_embeddings"]
    assert shape.tied_embeddings == record["tie_word_embeddings"]
    assert shape.rope.base == record.get("rope_theta", 10000)
    assert shape.rope.kind == ("llama3" if record.get("rope_scaling") else "default")
    # 6 for each weight in a product: all but norms and an embedding that is not the output's too.
    norms = sum(math.prod(size) for each in made for n, size in each.hf.items() if "norm" in n)
    table = 0 if shape.tied_embeddings else shape.vocab_size * shape.hidden_size
    attended = shape.num_layers * shape.num_heads * shape.head_dim
    assert training_flops(shape, [1]) == 6 * (expected - norms - table + attended)


def test_a_reference_with_a_window_that_is_shorter_than_a_row_is_refused(tmp_path):
    record, _ = CONFIGS["Mistral-7B-v0.3"]
    for name, window in (("policy", None), ("reference", 4096)):
        (tmp_path / name).mkdir()
        text = json.dumps(record | {"sliding_window": window})
        (tmp_path / name / "config.json").write_text(text)
    for budget, fits in ((4096, True), (4097, False)):
        policy = str(tmp_path / "policy")
        config = job_of(model__path=policy, actor__tokens_per_micro_batch=budget)
        said = r"reference\.path = .*: has a sliding window of 4096 .* may have 4097 tokens; use "
        with nullcontext() if fits else pytest.raises(ConfigError, match=said):
            found, shape = (read_architecture(tmp_path / n) for n in ("reference", "policy"))
            check_window(config, f"reference.path = '{tmp_path}'", found, shape)
