"""Who samples, and how new weights get there."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from relax_hpc.config.sections import (
    Bytes,
    NonNegative,
    Number,
    PassThrough,
    Positive,
    Resources,
    Section,
)

FP8_BLOCK = 128
"""Rows and columns of a weight that share a scale."""
Transport = Literal["collective", "files"]


class RolloutConfig(Section):
    engine: Literal["embedded", "sglang"] = "embedded"
    """`sglang` is the production engine; `embedded` runs anywhere torch does."""
    placement: Literal["own", "actor"] = "own"
    """own: a component with nodes of its own. actor: on the actor's GPUs, which the two use in
    turn; `schedule.max_staleness` is 0 then, and `resources` are the actor's."""
    num_engines: Positive = 1
    """Engines of the core job."""
    engines_per_task: Positive = 1
    """Engines that a task of the component keeps, each on GPUs of its own: with all of a node, the
    node has one task, which is one bus producer. An engine over several nodes has tasks alone."""
    nodes_per_engine: Positive = 1
    """Above 1, an engine spans that many nodes, with one task on each; `engine` is sglang then."""
    environment: str = "single_turn"
    """What an episode is: single_turn asks the prompt once. Others by the place of their class:
    "file.py:Class" or "package.module:Class"."""
    samples_per_prompt: Positive = 8
    """G, the siblings of a prompt group."""
    temperature: Annotated[Number, Field(gt=0)] = 1.0
    """Of sampling; the trainer's logprobs are of the same distribution. Held-out is greedy."""
    max_new_tokens: Positive = 256
    """Tokens of a response; one that reaches it ends there, with finish "length"."""
    max_running_requests: Positive = 256
    """Trajectories an engine decodes at once."""
    groups_per_shard: Positive = 16
    """A shard is published once it holds that many prompt groups, its batch is done, or its first
    group has waited for a second."""
    over_sampling: Annotated[Number, Field(ge=0)] = 0.0
    """Fraction of a batch that is sampled beyond what `schedule.max_staleness` admits, so that
    groups that are ready take the place of stragglers; needs `schedule.over_age` drop or mask."""
    routed_experts: bool = False
    """Record which experts each token went to, in the bus column ragged/routed_experts; needs a
    mixture of experts, and `engine` sglang."""
    start_timeout_s: Positive = 900
    """An engine that is not healthy after this many seconds has failed to start."""
    hang_timeout_s: Positive = 120
    """An engine that says nothing for this many seconds, outside an update, is started again."""
    restart_window_s: Positive = 1800
    """An engine that has to be started again more than `launch.max_restarts` times within this many
    seconds fails its task."""
    load_every_s: NonNegative = 5
    """Seconds between two `load` events of an engine: tokens sampled, requests, cache; 0 never."""
    engine_args: PassThrough = {}
    """Passed to the engine's own parser, e.g. mem_fraction_static = 0.8 for SGLang."""
    resources: Resources = Resources()

    @property
    def num_producers(self) -> int:
        """Tasks that sample: of an engine over several nodes it is the first."""
        return self.num_engines // self.engines_per_task

    @property
    def num_tasks(self) -> int:
        return self.num_producers * self.nodes_per_engine

    @model_validator(mode="after")
    def _fills_tasks(self) -> Self:
        key = f"rollout.engines_per_task = {self.engines_per_task}"
        if self.num_engines % self.engines_per_task:
            raise ValueError(
                f"{key}: does not divide rollout.num_engines = {self.num_engines}; use a divisor"
            )
        if self.engines_per_task > 1 and self.nodes_per_engine > 1:
            raise ValueError(
                f"{key}: an engine over {self.nodes_per_engine} nodes (rollout.nodes_per_engine) "
                "has a task on each of them for itself; use 1"
            )
        return self

    @model_validator(mode="after")
    def _records_experts(self) -> Self:
        if self.routed_experts and self.engine != "sglang":
            raise ValueError(
                "rollout.routed_experts = true: the embedded engine has no experts; use "
                "rollout.engine = 'sglang', or false"
            )
        return self

    @model_validator(mode="after")
    def _spans_nodes(self) -> Self:
        if self.nodes_per_engine == 1:
            return self
        if self.engine != "sglang":
            raise ValueError(
                f"rollout.nodes_per_engine = {self.nodes_per_engine}: the embedded engine is one "
                "process; use rollout.engine = 'sglang', or 1"
            )
        if self.resources.nodes != self.num_tasks:
            raise ValueError(
                f"rollout.nodes_per_engine = {self.nodes_per_engine}: {self.num_engines} engines "
                f"take {self.num_tasks} nodes of their own; set rollout.resources.nodes to it"
            )
        return self


class WeightsConfig(Section):
    transport: Transport = "collective"
    """`collective` broadcasts (NCCL or gloo); `files` goes through the run directory."""
    kv_cache: Literal["keep", "recompute"] = "keep"
    """What becomes of the key-value cache of running requests in an update. keep: they go on with
    keys and values of the policy before. recompute: it is thrown away, and the new policy reads
    their tokens again, which takes a prefill of all of them."""
    quantize: Literal["none", "fp8"] = "none"
    """`fp8` gives SGLang engines linear layers in 8 bits, with a scale per block of 128 x 128: the
    trainer quantises what it sends, which is half as much, and trains as before."""
    modules_to_not_convert: list[str] = []
    """With `quantize`: modules that engines keep as they are, e.g. "model.layers.0" or "o_proj"."""
    bucket_bytes: Bytes = 1 << 30
    """Tensors are sent in flat buckets of at most this size."""
    checksum_every: NonNegative = 10
    """Steps between comparisons of the engines' weights with the trainer's; 0 only at the end."""
    logprob_check: Literal["stop", "warn", "off"] = "stop"
    """What to do where engines and trainer compute different models. At each start of the actor
    their logprobs of tokens that the trainer's own policy sampled are compared, once."""
    max_logprob_gap: Annotated[Number, Field(gt=0)] | None = None
    """Mean difference of those logprobs, nats, that is rounding. Unset it goes by the type:
    float32 0.001, float16 0.03, bfloat16 0.15, engines with numbers of 8 bits or less 0.5."""
    timeout_s: Positive = 300
    """An engine that does not take an update within this time is fenced."""

    @property
    def quantization_config(self) -> dict[str, Any] | None:
        """What config.json says of a model whose weights are such; None if they are plain."""
        if self.quantize == "none":
            return None
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
            "modules_to_not_convert": self.modules_to_not_convert,
        }
