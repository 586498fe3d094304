"""`make_qwen3.py FOLDER [SHAPE [LAYERS]]`: Qwen3's shape with random weights, and prompts.

SHAPE is a name that `relax-hpc bench train` knows; qwen3-0.6b if left out. LAYERS: fewer than it
has. The tokenizer is the tiny one: its 320 ids are the first of the vocabulary, which is all that
prompts need; the model answers with any of its ids.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from relax_hpc.cli.bench.shapes import SHAPES
from relax_hpc.cli.demo import models, tasks

folder, shape = Path(sys.argv[1]), SHAPES[sys.argv[2] if len(sys.argv) > 2 else "qwen3-0.6b"]
tokenizer = models.tokenizer()
ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
if len(sys.argv) > 3:
    shape = shape | {"num_hidden_layers": int(sys.argv[3])}
config = AutoConfig.for_model(**(shape | ends | {"bos_token_id": None}))
torch.manual_seed(0)
with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
model.save_pretrained(folder / "model")
tokenizer.save_pretrained(folder / "model")
tasks.write_additions(folder, 2, 1024, 16, 0)
