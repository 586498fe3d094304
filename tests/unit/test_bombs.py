"""S9: files that are small, and say that much is to be made of them, are refused in a line."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from relax_hpc.data import rows as parquet
from relax_hpc.data.rows import ParquetRows
from relax_hpc.errors import ConfigError
from relax_hpc.trainer.models.registry import read_architecture

SMALL = {
    "model_type": "qwen3_moe", "num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 128,
    "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "rope_theta": 1e4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
SIZES = sorted(name for name, value in SMALL.items() if type(value) is int)


def said_of(folder, **changes):
    (folder / "config.json").write_text(json.dumps(SMALL | changes))
    with pytest.raises(ConfigError) as caught:
        read_architecture(folder)
    return str(caught.value)


@pytest.mark.parametrize("value", [10**13, 10**400])
@pytest.mark.parametrize("name", SIZES)
def test_a_size_that_no_model_has_is_refused_by_its_name(tmp_path, name, value):
    """S9: a tuple of a billion layers was made before anything was compared."""
    said = said_of(tmp_path, **{name: value})
    assert said.startswith(f"{tmp_path}/config.json: {name} = ") and "\n" not in said
    assert len(said) < 400


def test_a_billion_layers_are_refused_and_those_of_the_largest_models_are_not(tmp_path):
    """S9."""
    assert said_of(tmp_path, num_hidden_layers=10**9).endswith(
        "num_hidden_layers = 1000000000: no more than 1,024 is expected"
    )
    (tmp_path / "config.json").write_text(json.dumps(SMALL | {"num_hidden_layers": 1024}))
    assert read_architecture(tmp_path).num_layers == 1024


def repeated(text, count):
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, "int32")), pa.array([text]))


def test_a_row_group_of_millions_of_rows_is_refused_before_it_is_read(tmp_path, monkeypatch):
    """S9: 20 million rows in 100 KB."""
    table = pa.table({"prompt": repeated("1+1=", 3_000_000)})
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=len(table))
    monkeypatch.setattr(ParquetRows, "read", None)
    with pytest.raises(
        ConfigError, match=r"group 0 has 3,000,000 rows, 1,048,576 are the most; wr"
    ):
        ParquetRows(tmp_path / "x.parquet")


def test_a_long_text_that_many_rows_share_is_refused_once_and_little_of_it_is_made(
    tmp_path, monkeypatch
):
    """S9: 1,000 rows of 8 MiB, in a kilobyte; each row that was asked for made all of them."""
    monkeypatch.setattr(parquet, "_MOST_BATCH_BYTES", 1 << 26)
    monkeypatch.setattr(parquet, "MOST_GROUP_BYTES", 1 << 25)  # 7 rows are a batch
    schema = pa.schema([("prompt", pa.dictionary(pa.int32(), pa.string()))])
    with pq.ParquetWriter(
        tmp_path / "x.parquet", schema, compression="zstd", store_schema=False,
        dictionary_pagesize_limit=1 << 30,
    ) as writer:  # fmt: skip
        writer.write_table(pa.table({"prompt": repeated("x" * (8 << 20), 1000)}))
    assert (tmp_path / "x.parquet").stat().st_size < 10_000
    rows, before = ParquetRows(tmp_path / "x.parquet"), pa.total_allocated_bytes()
    pool = pa.default_memory_pool()
    for index in range(1000):
        with pytest.raises(ConfigError, match="row group 0 has 56 MiB or more in memory, 32 are"):
            rows[index]
        monkeypatch.setattr(parquet, "_parquet_reader", None)  # for the first alone
    assert pool.max_memory() - before < 1 << 29
