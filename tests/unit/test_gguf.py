"""Models in GGUF files: the same weights as transformers reads, and what is refused."""

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from relax_hpc.errors import ConfigError
from relax_hpc.trainer.checkpoints.gguf_file import convert

LAYERS, HIDDEN, FFN, HEADS, KV = 2, 64, 96, 4, 2
Q = gguf.GGMLQuantizationType
TOKENS = [*bytes_to_unicode().values(), "<|end|>", "ab"]


def write(path, architecture="qwen2", *, head="missing", scale=0.02, has_words=True, drop=""):
    """Writes a model whose tensors have several types, with or without an output layer."""
    draws = np.random.default_rng(7)
    writer = gguf.GGUFWriter(path, architecture)
    describe(writer)
    if has_words:
        add_words(writer)
    tied = draws.standard_normal((len(TOKENS), HIDDEN)) * scale
    drawn = {name: (draws.standard_normal(shape) * scale, kind)
             for name, shape, kind in tensors(architecture) if name != drop}  # fmt: skip
    drawn["token_embd.weight"] = tied, Q.Q4_0
    if head != "missing":
        drawn["output.weight"] = (tied if head == "tied" else tied[::-1]), Q.Q8_0
    for name, (data, kind) in drawn.items():
        packed = gguf.quantize(data.astype(np.float32), kind)
        writer.add_tensor(name, packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def describe(writer):
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(len(TOKENS))


def add_words(writer):
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([1] * 256 + [3, 1])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(256)
    writer.add_bos_token_id(256)
    writer.add_pad_token_id(256)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")


def tensors(architecture):
    """Yields name, shape and type of all but the embedding and the output layer."""
    yield "output_norm.weight", (HIDDEN,), Q.F32
    less = HIDDEN * KV // HEADS
    for layer in range(LAYERS):
        for name, rows, columns, kind in (
            ("attn_q", HIDDEN, HIDDEN, Q.Q8_0), ("attn_k", less, HIDDEN, Q.Q4_1),
            ("attn_v", less, HIDDEN, Q.Q5_0), ("attn_output", HIDDEN, HIDDEN, Q.Q8_0),
            ("ffn_gate", FFN, HIDDEN, Q.Q4_0), ("ffn_up", FFN, HIDDEN, Q.F16),
            ("ffn_down", HIDDEN, FFN, Q.Q8_0),
        ):  # fmt: skip
            yield f"blk.{layer}.{name}.weight", (rows, columns), kind
            if architecture == "qwen2" and name in ("attn_q", "attn_k", "attn_v"):
                yield f"blk.{layer}.{name}.bias", (rows,), Q.F32
        for name in ("attn_norm", "ffn_norm"):
            yield f"blk.{layer}.{name}.weight", (HIDDEN,), Q.F32


@pytest.mark.parametrize(
    ("architecture", "head"), [("qwen2", "missing"), ("qwen2", "own"), ("llama", "missing")]
)
def test_weights_are_bitwise_those_that_transformers_reads_of_the_file(
    tmp_path, architecture, head
):
    file = write(tmp_path / "model.gguf", architecture, head=head)
    out = convert(file, "hf", tmp_path / "hf")
    ours = load_file(out / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.config.tie_word_embeddings == (head == "missing")
    read = load_gguf_checkpoint(file, return_tensors=True, model_to_load=model)["tensors"]
    assert set(ours) == set(read) | ({"lm_head.weight"} & set(ours))
    for name, tensor in read.items():
        assert torch.equal(ours[name], torch.as_tensor(tensor).to(torch.bfloat16)), name
    assert sum(p.numel() for p in model.parameters()) == sum(t.numel() for t in ours.values())
    words = AutoTokenizer.from_pretrained(out)
    assert words.decode(words.encode("one+1")) == "one+1" and words.eos_token_id == 256
    assert words.apply_chat_template([{"content": "hi"}], tokenize=False) == "hi"


def test_an_output_layer_that_is_the_embedding_again_is_tied_and_the_finer_one_is_taken(tmp_path):
    file = write(tmp_path / "model.gguf", head="tied")
    out = convert(file, "hf", tmp_path / "hf")
    ours = load_file(out / "model.safetensors")
    tensors = {each.name: each for each in gguf.GGUFReader(file).tensors}
    finer = gguf.dequantize(tensors["output.weight"].data, Q.Q8_0)
    assert "lm_head.weight" not in ours
    assert torch.equal(ours["model.embed_tokens.weight"], torch.from_numpy(finer).bfloat16())


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"architecture": "falcon"}, "general.architecture = 'falcon': only llama, qwen2, qwen3"),
        ({"has_words": False}, "has no tokenizer.ggml.tokens"),
        ({"drop": "blk.1.ffn_up.weight"}, r"has no blk.1.ffn_up.weight, which is model.layers.1"),
        ({"scale": 1e5}, "has values up to .* joined in a wrong order"),
    ],
)
def test_a_file_that_is_no_model_to_train_is_refused_and_leaves_nothing(tmp_path, how, said):
    file = write(tmp_path / "model.gguf", **how)
    with pytest.raises(ConfigError, match=said):
        convert(file, "hf", tmp_path / "hf")
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


@pytest.mark.parametrize("what", ["cut short", "second part first", "an error page"])
def test_a_file_that_is_not_whole_is_refused(tmp_path, what):
    file = write(tmp_path / "model.gguf")
    content = file.read_bytes()
    half = len(content) // 2
    file.write_bytes({
        "cut short": content[: half * 3 // 2], "second part first": content[half:] + content[:half],
        "an error page": b"<!DOCTYPE html><title>404</title>" * 99,
    }[what])  # fmt: skip
    with pytest.raises(ConfigError, match="is no GGUF file, or not all of one"):
        convert(file, "hf", tmp_path / "hf")
    with pytest.raises(ConfigError, match="--to megatron: a GGUF file is converted to hf"):
        convert(file, "megatron", tmp_path / "hf")
