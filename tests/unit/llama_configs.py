"""config.json of published models of Llama's form, and how many parameters each has."""

_LLAMA3 = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False,
    "attention_dropout": 0.0, "hidden_act": "silu", "initializer_range": 0.02, "mlp_bias": False,
    "pretraining_tp": 1, "rms_norm_eps": 1e-05, "torch_dtype": "bfloat16", "use_cache": True,
    "bos_token_id": 128000, "eos_token_id": 128001, "max_position_embeddings": 131072,
    "num_key_value_heads": 8, "rope_theta": 500000.0, "tie_word_embeddings": False,
    "transformers_version": "4.43.0.dev0", "vocab_size": 128256,
    "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3",
    },
}  # fmt: skip

CONFIGS = {
    "Llama-3.1-8B": (
        _LLAMA3 | {
            "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
            "num_hidden_layers": 32,
        },
        8_030_261_248,
    ),
    "Llama-3.2-1B": (
        _LLAMA3 | {
            "head_dim": 64, "hidden_size": 2048, "intermediate_size": 8192,
            "num_attention_heads": 32, "num_hidden_layers": 16, "tie_word_embeddings": True,
            "rope_scaling": _LLAMA3["rope_scaling"] | {"factor": 32.0},
        },
        1_235_814_400,
    ),
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
}  # fmt: skip
"""By the name on the hub: the file, and the sum over its tensors, which the hub shows."""
