"""`make_qwen3.py FOLDER`: a checkpoint of Qwen3-0.6B's shape with random weights, and prompts.

The tokenizer is the tiny one: its 320 ids are the first of the vocabulary, which is all that
prompts need; the model answers with any of its 151,936 ids.
"""

import sys
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from relax_hpc.engines.tiny import checkpoint
from relax_hpc.prompts import arithmetic

folder = Path(sys.argv[1])
tokenizer = checkpoint.tokenizer()
config = Qwen3Config(
    vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
    num_attention_heads=16, num_key_value_heads=8, head_dim=128, max_position_embeddings=40960,
    rms_norm_eps=1e-6, tie_word_embeddings=True, eos_token_id=tokenizer.eos_token_id,
    pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    rope_parameters={"rope_type": "default", "rope_theta": 1e6},
)  # fmt: skip
torch.manual_seed(0)
torch.set_default_dtype(torch.bfloat16)
model = Qwen3ForCausalLM(config)
model.save_pretrained(folder / "model")
tokenizer.save_pretrained(folder / "model")
arithmetic.write(folder, 2, 256, 16, 0)
