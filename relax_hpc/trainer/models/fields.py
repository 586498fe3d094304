"""Lists how each config.json field is handled: used, restricted to some values, or ignored.

transformers ignores unlisted fields, too; `unknown` finds them, for a warning.
"""

from collections.abc import Mapping
from typing import NamedTuple

from relax_hpc.config.hf_config import ConfigJson, Table
from relax_hpc.trainer.models.rope import find_lost_base

QWEN3_HEAD_DIM = 128
"""Channels of a head of dense Qwen3, if config.json has none."""


class Obeyed(NamedTuple):
    """Used by the architecture's file, whatever its value."""

    what: str


class Only(NamedTuple):
    """Other values are refused; a missing field is fine."""

    values: tuple[object, ...]
    why: str


class Inert(NamedTuple):
    """Has no effect here."""

    why: str


Field = Obeyed | Only | Inert

_SHAPE = Obeyed("the shape of the model")
_ROPE = Obeyed("rotary positions: default, linear, yarn, llama3")
_EXPERTS = Obeyed("layers of experts")
_WINDOW = Inert("no layer of Qwen has a sliding window")
_LABELS = Inert("of classifiers")
_RETURNED = Inert("what a call of transformers returns")
_KERNELS = Inert("how transformers computes the same")
_ORIGIN = Inert("where the folder comes from")
_SAMPLING = Inert("the job says how is sampled")
_ROUTER_LOSS = Inert("the job says it: actor.transformer.moe_aux_loss_coeff")
_OTHER_FILES = "the model is in config.json and the safetensors beside it"
_CACHE = Inert("of generation by transformers")

FIELDS: Mapping[str, Field] = {
    "model_type": Obeyed("the architecture"),
    "vocab_size": _SHAPE,
    "hidden_size": _SHAPE,
    "intermediate_size": _SHAPE,
    "num_hidden_layers": _SHAPE,
    "num_attention_heads": _SHAPE,
    "num_key_value_heads": _SHAPE,
    "head_dim": _SHAPE,
    "rms_norm_eps": Obeyed("every norm"),
    "tie_word_embeddings": Obeyed("whether the output matrix is the embedding"),
    "max_position_embeddings": Obeyed("how long a prompt and its response may be"),
    "rope_parameters": _ROPE,
    "rope_scaling": _ROPE,
    "rope_theta": _ROPE,
    "original_max_position_embeddings": Only(
        (None,), "rotary positions are scaled by what is in rope_parameters"
    ),
    "partial_rotary_factor": Only((None, 1.0), "all channels of a head turn"),
    "num_experts": _EXPERTS,
    "num_local_experts": _EXPERTS,
    "num_experts_per_tok": _EXPERTS,
    "moe_intermediate_size": _EXPERTS,
    "norm_topk_prob": _EXPERTS,
    "mlp_only_layers": _EXPERTS,
    "decoder_sparse_step": _EXPERTS,
    "hidden_act": Only(("silu",), "the feed-forward layers are SwiGLU"),
    "attention_bias": Only((False,), "only Qwen2 has biases, and always"),
    "mlp_bias": Only((False,), "the feed-forward layers have no biases, nor has SGLang for them"),
    "pretraining_tp": Only((None, 1), "products of matrices are not cut into slices"),
    "rope_interleaved": Only((None, False), "a channel turns with the one half a head away"),
    "use_sliding_window": Only((False,), "every token sees all before it"),
    "sliding_window": Obeyed("how long a text of Mistral may be; no layer of others has one"),
    "max_window_layers": _WINDOW,
    "layer_types": Only((), "every layer is of full attention"),
    "attention_chunk_size": Only((None,), "every token sees all before it"),
    "dual_chunk_attention_config": Only((None,), "every token sees all before it"),
    "is_causal": Only((None, True), "no token sees what comes after it"),
    "is_decoder": Inert("these models always are"),
    "is_encoder_decoder": Only((False,), "there is no encoder"),
    "per_layer_config": Only((None, {}), "layers differ by their experts alone"),
    "kv_sharing_modes": Only((None,), "every layer has keys and values of its own"),
    "fusion_config": Only((None, {}), "the model is that of transformers' default"),
    "quantization_config": Only((None,), "weights are trained as they are; weights.quantize is "
                                "for engines"),
    "configuration_files": Only((None, [], {}), _OTHER_FILES),
    "transformers_weights": Only((None,), _OTHER_FILES),
    "architectures": Only((), "it is what engines go by"),
    "eos_token_id": Obeyed("ends a response, as those of generation_config.json"),
    "bos_token_id": Inert("the tokenizer puts it there, or not"),
    "pad_token_id": Inert("nothing is padded; its embedding is trained like others, where "
                          "transformers gives it no gradient"),
    "dtype": Inert("model.dtype of the job; an export says its own"),
    "torch_dtype": Inert("model.dtype of the job; an export says its own"),
    "attention_dropout": Inert("training drops nothing, as sampling does not"),
    "initializer_range": Inert("no weights are drawn"),
    "router_aux_loss_coef": _ROUTER_LOSS,
    "output_router_logits": _ROUTER_LOSS,
    "use_cache": _CACHE,
    "cache_implementation": _CACHE,
    "chunk_size_feed_forward": _KERNELS,
    "gradient_checkpointing": _KERNELS,
    "attn_implementation": _KERNELS,
    "_attn_implementation": _KERNELS,
    "_attn_implementation_autoset": _KERNELS,
    "experts_implementation": _KERNELS,
    "_experts_implementation": _KERNELS,
    "distributed_config": _KERNELS,
    "use_kernels": _KERNELS,
    "output_hidden_states": _RETURNED,
    "output_attentions": _RETURNED,
    "return_dict": _RETURNED,
    "use_return_dict": _RETURNED,
    "tie_last_hidden_states": _RETURNED,
    "torchscript": _RETURNED,
    "num_labels": _LABELS,
    "id2label": _LABELS,
    "label2id": _LABELS,
    "problem_type": _LABELS,
    "classifier_dropout": _LABELS,
    "transformers_version": _ORIGIN,
    "name_or_path": _ORIGIN,
    "_name_or_path": _ORIGIN,
    "_commit_hash": _ORIGIN,
    "is_llama_config": _ORIGIN,
    "transformers.js_config": _ORIGIN,
    "tokenizer_class": Inert("tokenizer_config.json says it"),
    "auto_map": Inert("code of the folder is not run"),
    "use_mrope": Only((None, False), "positions are those of text"),
    **dict.fromkeys(
        (
            "bad_words_ids", "begin_suppress_tokens", "diversity_penalty", "do_sample",
            "early_stopping", "encoder_no_repeat_ngram_size", "encoder_repetition_penalty",
            "epsilon_cutoff", "eta_cutoff", "exponential_decay_length_penalty",
            "forced_bos_token_id", "forced_eos_token_id", "length_penalty", "max_length",
            "max_new_tokens", "min_length", "no_repeat_ngram_size", "num_beam_groups", "num_beams",
            "num_return_sequences", "output_scores", "remove_invalid_values", "repetition_penalty",
            "return_dict_in_generate", "suppress_tokens", "temperature", "top_k", "top_p",
            "typical_p", "assistant_confidence_threshold", "assistant_lookbehind",
            "num_assistant_tokens", "num_assistant_tokens_schedule", "target_lookbehind",
        ),
        _SAMPLING,
    ),
}  # fmt: skip


_OLDER = Inert("what transformers 4 wrote of every model")
_NOWHERE = Inert("transformers reads it nowhere")
_OF_4: Mapping[str, Field] = dict.fromkeys(
    (
        "add_cross_attention", "cross_attention_hidden_size", "decoder_start_token_id",
        "finetuning_task", "is_decoder", "prefix", "pruned_heads", "sep_token_id",
        "task_specific_params", "tf_legacy_loss", "tie_encoder_decoder", "use_bfloat16",
    ),
    _OLDER,
)  # fmt: skip

_TOWER = Obeyed("the shape of the tower")

VISION_FIELDS: Mapping[str, Field] = {
    **{name: field for name, field in FIELDS.items() if isinstance(field, Inert)},
    "model_type": Inert("the architecture decides it"),
    "depth": _TOWER,
    "hidden_size": _TOWER,
    "intermediate_size": _TOWER,
    "num_heads": _TOWER,
    "patch_size": _TOWER,
    "temporal_patch_size": _TOWER,
    "spatial_merge_size": _TOWER,
    "out_hidden_size": _TOWER,
    "num_position_embeddings": _TOWER,
    "deepstack_visual_indexes": _TOWER,
    "rope_parameters": Obeyed("the angles of patches"),
    "hidden_act": Only(("gelu_pytorch_tanh",), "the feed-forward layers are"),
    "in_channels": Only((3,), "pixels are red, green and blue"),
    "num_attention_heads": Inert("num_heads says it"),
    "num_hidden_layers": Inert("depth says it"),
    **{name: FIELDS[name] for name in ("architectures", "is_encoder_decoder", "per_layer_config",
                                       "fusion_config", "quantization_config")},
}  # fmt: skip
"""Fields of `vision_config`, in a vision model."""

OMNI_VISION_FIELDS: Mapping[str, Field] = {
    **_OF_4,
    **VISION_FIELDS,
    "tie_word_embeddings": Inert("a tower has no words"),
    **dict.fromkeys(
        ("apply_vit_abs_pos_embed", "image_size", "in_chans", "spatial_patch_size",
         "tokens_per_second"),
        _NOWHERE,
    ),
}  # fmt: skip
"""Fields of `vision_config`, in an omni model."""

OMNI_TEXT_FIELDS: Mapping[str, Field] = {
    **_OF_4,
    **FIELDS,
    "use_qk_norm": Only((True,), "queries and keys have norms"),
    "shared_expert_intermediate_size": Only((0,), "no expert is of all tokens"),
}
"""Fields of the omni model's `text_config`."""

_TOKENS = Inert("the rollout says which tokens stand for media")

WHOLE_FIELDS: Mapping[str, Field] = {
    **{name: field for name, field in FIELDS.items() if not isinstance(field, Obeyed)},
    **{name: FIELDS[name] for name in ("model_type", "tie_word_embeddings", "eos_token_id")},
    "text_config": Obeyed("the model of language; `FIELDS` are in it"),
    "vision_config": Obeyed("the tower"),
    "image_token_id": _TOKENS,
    "video_token_id": _TOKENS,
    "vision_start_token_id": _TOKENS,
    "vision_end_token_id": _TOKENS,
}
"""Top-level fields of a vision model."""


_SPEAKS = Inert("of the parts that speak, which an export has as they are")
_OF_ALL: Mapping[str, Field] = {
    name: field for name, field in FIELDS.items() if not isinstance(field, Obeyed)
}

AUDIO_FIELDS: Mapping[str, Field] = {
    **_OF_4,
    "tie_word_embeddings": Inert("a tower has no words"),
    **{name: field for name, field in FIELDS.items() if isinstance(field, Inert)},
    "model_type": Inert("the architecture decides it"),
    "encoder_layers": _TOWER,
    "d_model": _TOWER,
    "encoder_ffn_dim": _TOWER,
    "encoder_attention_heads": _TOWER,
    "num_mel_bins": _TOWER,
    "downsample_hidden_size": _TOWER,
    "output_dim": _TOWER,
    "n_window_infer": _TOWER,
    "n_window": Only((50,), "a chunk is of 100 mel frames, and of 13 tokens"),
    "activation_function": Only(("gelu",), "the feed-forward layers are"),
    "scale_embedding": Only((False,), "transformers scales nothing"),
    "max_source_positions": Inert("positions are within a chunk"),
    "conv_chunksize": _KERNELS,
    "dropout": Inert("training drops nothing, as sampling does not"),
    "activation_dropout": Inert("training drops nothing, as sampling does not"),
    "num_hidden_layers": Inert("encoder_layers says it"),
    "hidden_size": Inert("d_model says it"),
    "intermediate_size": Inert("encoder_ffn_dim says it"),
    "num_attention_heads": Inert("encoder_attention_heads says it"),
    **{name: FIELDS[name] for name in ("architectures", "is_encoder_decoder", "per_layer_config",
                                       "fusion_config", "quantization_config")},
}  # fmt: skip
"""Fields of `audio_config`, in an omni model."""

THINKER_FIELDS: Mapping[str, Field] = {
    **WHOLE_FIELDS,
    "audio_config": Obeyed("the tower that hears"),
    "position_id_per_seconds": Obeyed("positions of videos"),
    "audio_token_id": _TOKENS,
    "audio_start_token_id": _TOKENS,
    "audio_end_token_id": _TOKENS,
    "user_token_id": _SPEAKS,
    "seconds_per_chunk": Inert("sound that is in a video is not taken"),
}
"""Fields of `thinker_config`, which has the omni model's parts that read."""

OMNI_FIELDS: Mapping[str, Field] = {
    **_OF_ALL,
    "model_type": FIELDS["model_type"],
    "eos_token_id": FIELDS["eos_token_id"],
    "tie_word_embeddings": Inert("thinker_config says it"),
    "thinker_config": Obeyed("the model; `THINKER_FIELDS` are in it"),
    **dict.fromkeys(
        (
            "talker_config", "code2wav_config", "enable_audio_output", "im_start_token_id",
            "im_end_token_id", "system_token_id", "user_token_id", "assistant_token_id",
            "tts_pad_token_id", "tts_bos_token_id", "tts_eos_token_id",
        ),
        _SPEAKS,
    ),
}  # fmt: skip
"""Top-level fields of an omni model."""


class ConfigObject(NamedTuple):
    """An object of config.json that describes the model."""

    table: Table
    fields: Mapping[str, Field]


def language_of(config: ConfigJson) -> Table:
    """Returns the object that describes the language model."""
    whole = config.table("thinker_config") if "thinker_config" in config.record else config
    return whole.table("text_config") if "text_config" in whole.record else whole


def parts(config: ConfigJson) -> list[ConfigObject]:
    """Returns all objects that describe the model."""
    language = ConfigObject(language_of(config), FIELDS)
    if "thinker_config" in config.record:
        thinker = config.table("thinker_config")
        return [
            ConfigObject(config, OMNI_FIELDS), ConfigObject(thinker, THINKER_FIELDS),
            ConfigObject(language.table, OMNI_TEXT_FIELDS),
            ConfigObject(thinker.table("vision_config"), OMNI_VISION_FIELDS),
            ConfigObject(thinker.table("audio_config"), AUDIO_FIELDS),
        ]  # fmt: skip
    if "vision_config" not in config.record:
        return [language]
    vision = ConfigObject(config.table("vision_config"), VISION_FIELDS)
    return [ConfigObject(config, WHOLE_FIELDS), language, vision]


def check(config: ConfigJson, causal: str) -> None:
    """Checks for values that the trainer would compute differently from transformers.

    Args:
        causal: the class of transformers that engine and trainer implement.

    Raises:
        ConfigError: has the field, its value and the supported values.
    """
    for table, known in parts(config):
        for name in table.record:
            field = known.get(name)
            if not isinstance(field, Only):
                continue
            values = _values(name, table, causal if table is config else None) or field.values
            if table.get(name) not in values:
                supported = " or ".join(map(repr, values))
                raise table.make_error(name, f"only {supported} is supported: {field.why}")


def _values(name: str, table: Table, causal: str | None) -> tuple[object, ...]:
    """Returns further values that other fields make acceptable."""
    if name == "layer_types":
        return None, ["full_attention"] * table.size("num_hidden_layers")
    if name == "architectures":
        return None, [causal]
    return ()


def doubts(config: ConfigJson) -> list[str]:
    """Returns a warning for each setting that transformers ignores, but somebody may have meant."""
    found = []
    for table, known in parts(config):
        if unknown := sorted(set(table.record) - set(known)):
            fields, are = ("fields", "are") if unknown[1:] else ("field", "is")
            found.append(
                f"{table.place}{', '.join(unknown)}: unknown {fields}, {are} passed over, as "
                "transformers does; if they change the model, it cannot be trained here"
            )
    language = language_of(config)
    if lost := find_lost_base(language):
        found.append(
            f"{language.place}rope_parameters.rope_theta = {lost}: is passed over, as transformers "
            "does, since there is rope_scaling; write it there"
        )
    return found
