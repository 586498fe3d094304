"""Configures sampling, weight updates of engines, and rewards."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from relax_hpc.sections import Bytes, NonNegative, Number, PassThrough, Positive, Section, UserPath

FP8_BLOCK = 128
"""Rows and columns of a weight that share a scale."""
TOWERS = ["visual", "audio_tower"]
"""Vision and audio modules, which engines keep in 16 bits."""
PLACES = ("task", "outcome")
"""Placeholders for file paths in a program's command."""
_PLACE = re.compile(r"(?<!\$)\{([a-z_]+)\}")
TransportName = Literal["collective", "files"]
StopTexts = list[Annotated[str, Field(min_length=1)]]


class ProgramConfig(Section):
    """An agent that is a separate program."""

    command: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]
    """The program and its arguments. {task} stands for a JSON file with the prompt, {outcome} for
    one to which it may write rewards and metrics; both are per episode. Its variables
    OPENAI_BASE_URL and OPENAI_API_KEY give access to the policy."""
    folder: UserPath = Path()
    """Working directory of the program; paths in `command` are relative to it."""
    timeout_s: Positive = 1800
    """Seconds for an episode, not counting waits for the policy; then the program is ended, and the
    episode has failed."""

    @field_validator("command")
    @classmethod
    def _places_are_known(cls, command: list[str]) -> list[str]:
        asked = [name for word in command for name in _PLACE.findall(word)]
        for name in asked:
            if name not in PLACES:
                raise ValueError(f"{{{name}}} stands for nothing; there are {{task}}, {{outcome}}")
        if "task" not in asked:
            raise ValueError("nobody tells the program its prompt; add a word {task}")
        return command


class RolloutAdvanced(Section):
    max_continuations: NonNegative | None = None
    """How often a response interrupted by the end of the job is continued, before it is sampled
    again from its beginning; unset has no limit, 0 is never."""
    groups_per_shard: Positive = 16
    """A shard is published once it has this many prompt groups, its batch is done, or its first
    group has waited for a second."""
    over_sampling: Annotated[Number, Field(ge=0)] = 0.0
    """Fraction of a batch sampled beyond what `schedule.max_staleness` admits, so that ready groups
    replace stragglers; needs `schedule.over_age` drop or mask."""
    routed_experts: bool | None = None
    """Record each token's experts in the bus column ragged/routed_experts, and train with the same
    ones (routing replay). Needs a mixture of experts, `engines.rollout.kind` sglang, and no
    `stop`. Unset is true if these hold."""


class RolloutConfig(Section):
    environment: str = "single_turn"
    """Kind of episode: single_turn asks the prompt once, program starts the agent of
    `rollout.program`. Others by the place of their class: "file.py:Class" or
    "package.module:Class"."""
    samples_per_prompt: Positive = 8
    """G, the siblings of a prompt group."""
    temperature: Annotated[Number, Field(gt=0)] = 1.0
    """Sampling temperature; the trainer's logprobs use the same. Held-out samples are greedy. A
    model's generation_config.json (top_p, penalties) touches neither."""
    max_new_tokens: Positive = 256
    """Most tokens of a response; one that reaches it ends there, with finish "length"."""
    stop: StopTexts = []
    """Texts that end a response, e.g. "</search>", as an end of sequence does. The response keeps
    them, and they are trained on. An environment may set others for each reply."""
    advanced: RolloutAdvanced = RolloutAdvanced()
    program: ProgramConfig | None = None
    """Agent that talks to the policy over OpenAI's chat API."""


class WeightsAdvanced(Section):
    kv_cache: Literal["keep", "recompute"] = "keep"
    """Handling of running requests' key-value cache in an update. keep: they continue with the old
    policy's keys and values. recompute: it is dropped, and the new policy prefills their tokens
    again."""
    modules_to_not_convert: list[str] = []
    """Further modules that `weights.quantize` skips, e.g. "model.layers.0" or "o_proj"."""
    bucket_bytes: Bytes = 1 << 30
    """Largest size of the flat buckets in which tensors are sent."""
    checksum_every: NonNegative = 10
    """Steps between comparisons of the engines' weights with the trainer's; 0 only compares at
    the end."""
    max_logprob_gap: Annotated[Number, Field(gt=0)] | None = None
    """Largest mean difference, in nats, between the engines' and the trainer's logprobs that counts
    as rounding. Above it they compute different models, and the run ends. Compared once, at each
    start of the actor. Unset depends on the type: float32 0.001, float16 0.03, bfloat16 0.15,
    engines with 8 bits or fewer 0.5. A large value only records the difference."""
    timeout_s: Positive = 300
    """An engine that does not take an update within this time is fenced."""


class WeightsConfig(Section):
    transport: TransportName = "collective"
    """`collective` broadcasts (NCCL or gloo); `files` goes through the run directory."""
    quantize: Literal["none", "fp8"] = "none"
    """`fp8` gives SGLang engines 8-bit linear layers, with a scale per block of 128 x 128: the
    trainer quantises what it sends, which halves the bytes, and trains as before. Vision and
    audio encoders keep 16 bits."""
    advanced: WeightsAdvanced = WeightsAdvanced()

    @property
    def quantization_config(self) -> dict[str, Any] | None:
        """Returns config.json's entry for quantised weights; None for plain ones."""
        if self.quantize == "none":
            return None
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
            "modules_to_not_convert": [*self.advanced.modules_to_not_convert, *TOWERS],
        }


_NAME = r"^[A-Za-z0-9][A-Za-z0-9_-]*$"
_DEFAULT = "boxed_number"


class RewardTerm(Section):
    """One of several rewards that are added."""

    name: str
    """Function that scores a response, as in `reward.name`."""
    weight: Number = 1.0
    """The reward is the sum of weight times score."""
    args: PassThrough = {}
    """Settings of the function, as in `reward.args`."""
    sources: list[str] = []
    """Names of `prompts.sources`, of held-out sets, or in the field `source` of rows, whose prompts
    it scores; [] is all. Every prompt needs at least one term."""


class RewardAdvanced(Section):
    memory_gib: Annotated[Number, Field(ge=0.25)] = 2.0
    """Memory of a scoring process; one that retains half of it is replaced."""
    most_errors: Annotated[Number, Field(ge=0, le=1)] = 0.05
    """Fraction of the newest 500 rewards that may fail; with more the run ends and names them."""
    solved_at: Number = 1.0
    """A prompt whose responses all reach this counts as solved, in `groups/solved` of a step."""
    workers: Positive = 2
    """Scoring processes of each rollout task, besides a spare one."""


class RewardConfig(Section):
    name: str | None = None
    """Function that scores a response: a built-in one, boxed_number by default, or your own
    "file.py:function" or "package.module:function"; see docs/how-to/rewards.md."""
    args: PassThrough = {}
    """Settings of the function: its keyword-only parameters."""
    terms: dict[Annotated[str, Field(pattern=_NAME, max_length=40)], RewardTerm] = {}
    """Several rewards, instead of `name`, by names that you choose."""
    deadline_s: Annotated[Number, Field(gt=0)] = 10.0
    """Seconds for one sample, or one group if the reward sees it whole; more is an error."""
    on_error: Literal["zero", "mask"] = "zero"
    """Handling of failed rewards. zero: 0, or the lowest value of a built-in reward. mask: the
    response is neither compared with its siblings nor trained on, and excluded from held-out
    figures."""
    advanced: RewardAdvanced = RewardAdvanced()

    @property
    def masks_errors(self) -> bool:
        """Whether a response with a failed reward is masked."""
        return self.on_error == "mask"

    @property
    def every_term(self) -> dict[str, RewardTerm]:
        """Returns the terms by name; a single function is called ""."""
        return dict(self.terms) or {"": RewardTerm(name=self.only_name, args=self.args)}

    @property
    def only_name(self) -> str:
        """The function, if there are no terms."""
        return self.name or _DEFAULT

    @model_validator(mode="after")
    def _is_one_or_several(self) -> Self:
        if self.terms and (self.name is not None or self.args):
            key = "args" if self.name is None else f"name = {self.name!r}"
            raise ValueError(
                f"reward.{key}: the reward is the sum of reward.terms ({', '.join(self.terms)}); "
                "make it one of them, or remove it"
            )
        return self
