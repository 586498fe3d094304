"""A complete Qwen3 checkpoint small enough for one CPU core, made offline.

Everything about it is what the full-size models have, only less of it: `AutoTokenizer`,
`AutoModelForCausalLM`, SGLang and the Megatron loader read it like any other Hugging Face folder.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils import logging as transformers_logging

END_OF_TEXT, TURN_START, TURN_END = SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
WORDS = ["\\boxed{", "user\n", "assistant\n"]
"""Frequent here, so one token each: a prompt of the addition task is 12 tokens, not 23."""

VOCAB_SIZE = 320
"""256 bytes, 3 special tokens, 3 words; padded to a multiple of 64 to split over ranks."""

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def tokenizer(
    *,
    special: Sequence[str] = SPECIAL,
    words: Sequence[str] = WORDS,
    chat_template: str = CHAT_TEMPLATE,
    named: Mapping[str, str] | None = None,
) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer without merges: every string round-trips, nothing is unknown.

    Args:
        special: tokens besides the bytes, those of `SPECIAL` first.
        words: frequent texts that are one token each.
        chat_template: goes into its folder.
        named: special tokens that a processor asks for by these names.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(s, normalized=False, special=True) for s in special])
    backend.add_tokens([AddedToken(w, normalized=False, special=False) for w in words])
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
        **({"extra_special_tokens": dict(named)} if named else {}),
    )
    made.chat_template = chat_template
    return made


def model(tokens: PreTrainedTokenizerFast, *, seed: int) -> Qwen3ForCausalLM:
    """A Qwen3 of 0.6 million parameters with random float32 weights drawn from `seed`."""
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        pad_token_id=tokens.pad_token_id,
        eos_token_id=tokens.eos_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config).float().eval()


def save(folder: Path, made: PreTrainedModel, tokens: PreTrainedTokenizerFast) -> None:
    """Writes config.json, safetensors, the tokenizer and its template, generation_config.json."""
    made.generation_config.eos_token_id = [tokens.eos_token_id]
    made.generation_config.pad_token_id = tokens.pad_token_id
    transformers_logging.disable_progress_bar()  # one file, in no time
    made.save_pretrained(folder)
    made.generation_config.save_pretrained(folder)
    tokens.save_pretrained(folder)
