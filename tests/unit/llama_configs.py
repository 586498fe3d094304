"""config.json of published models of Llama's form, and how many parameters each has."""

_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False,
    "attention_dropout": 0.0, "hidden_act": "silu", "initializer_range": 0.02, "mlp_bias": False,
    "pretraining_tp": 1, "rms_norm_eps": 1e-05, "torch_dtype": "bfloat16", "use_cache": True,
}  # fmt: skip
_LLAMA3 = _LLAMA | {
    "bos_token_id": 128000, "eos_token_id": 128001, "max_position_embeddings": 131072,
    "num_key_value_heads": 8, "rope_theta": 500000.0, "tie_word_embeddings": False,
    "transformers_version": "4.43.0.dev0", "vocab_size": 128256,
    "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3",
    },
}  # fmt: skip
_8B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_hidden_layers": 32,
}  # fmt: skip
_ENDS = {"eos_token_id": [128001, 128008, 128009]}

CONFIGS = {
    "Llama-2-7b-hf": (
        _LLAMA | {
            "bos_token_id": 1, "eos_token_id": 2, "hidden_size": 4096, "intermediate_size": 11008,
            "max_position_embeddings": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
            "num_key_value_heads": 32, "rope_scaling": None, "tie_word_embeddings": False,
            "torch_dtype": "float16", "transformers_version": "4.31.0.dev0", "vocab_size": 32000,
        },
        6_738_415_616,
    ),
    "Llama-3.1-8B": (_LLAMA3 | _8B, 8_030_261_248),
    "Llama-3.2-1B": (
        _LLAMA3 | {
            "head_dim": 64, "hidden_size": 2048, "intermediate_size": 8192,
            "num_attention_heads": 32, "num_hidden_layers": 16, "tie_word_embeddings": True,
            "rope_scaling": _LLAMA3["rope_scaling"] | {"factor": 32.0},
        },
        1_235_814_400,
    ),
    "Llama-3.3-70B-Instruct": (
        _LLAMA3 | _ENDS | {
            "head_dim": 128, "hidden_size": 8192, "intermediate_size": 28672,
            "num_attention_heads": 64, "num_hidden_layers": 80,
        },
        70_553_706_496,
    ),
    "DeepSeek-R1-Distill-Llama-8B": (_LLAMA3 | _8B, 8_030_261_248),
    "Mistral-7B-v0.3": (
        {
            "architectures": ["MistralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1,
            "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096,
            "initializer_range": 0.02, "intermediate_size": 14336,
            "max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32,
            "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
            "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False,
            "torch_dtype": "bfloat16", "transformers_version": "4.42.0.dev0", "use_cache": True,
            "vocab_size": 32768,
        },
        7_248_023_552,
    ),
    "SmolLM2-135M": (
        _LLAMA | {
            "bos_token_id": 0, "eos_token_id": 0, "hidden_size": 576, "initializer_range": 0.041666,
            "intermediate_size": 1536, "is_llama_config": True, "max_position_embeddings": 8192,
            "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
            "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000,
            "tie_word_embeddings": True, "transformers_version": "4.40.1", "vocab_size": 49152,
        },
        134_515_008,
    ),
}  # fmt: skip
"""By the name on the hub: the file, and the sum over its tensors, which the hub shows."""
