"""Sampling, and the way of new weights to the engines."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from relax_hpc.sections import Bytes, NonNegative, Number, Positive, Section, UserPath

FP8_BLOCK = 128
"""Rows and columns of a weight that share a scale."""
TOWERS = ["visual", "audio_tower"]
"""Modules that see or hear, which engines keep in 16 bits."""
PLACES = ("task", "outcome")
"""Names in braces for which a word of a program's command has the path of a file."""
_PLACE = re.compile(r"(?<!\$)\{([a-z_]+)\}")
Transport = Literal["collective", "files"]
StopTexts = list[Annotated[str, Field(min_length=1)]]


class ProgramConfig(Section):
    """An agent that is a program of its own."""

    command: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]
    """The program and its arguments, a word each. {task} stands for a JSON file with the prompt,
    {outcome} for one that it may write rewards and metrics to; both are of the episode. Its
    variables OPENAI_BASE_URL and OPENAI_API_KEY say how it asks the policy."""
    folder: UserPath = Path()
    """Folder that it is started in; paths in `command` count from there."""
    timeout_s: Positive = 1800
    """Seconds that it may take for an episode, without those in which it waits for the policy;
    then it is ended, and the episode has failed."""

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


class RolloutConfig(Section):
    environment: str = "single_turn"
    """Kind of an episode: single_turn asks the prompt once, program starts the agent of
    `rollout.program`. Others by the place of their class: "file.py:Class" or
    "package.module:Class"."""
    samples_per_prompt: Positive = 8
    """G, the siblings of a prompt group."""
    temperature: Annotated[Number, Field(gt=0)] = 1.0
    """Temperature of sampling; the trainer's logprobs are of the same distribution. Held-out is
    greedy."""
    max_new_tokens: Positive = 256
    """Tokens of a response; one that reaches it ends there, with finish "length"."""
    stop: StopTexts = []
    """Texts that end a response, which keeps them, e.g. "</search>"; an end of sequence does so,
    too. They are trained on as what was sampled. An environment may say others for each reply."""
    max_continuations: NonNegative | None = None
    """A response that the end of the job broke off is gone on with after so many announced ends at
    most, then it is sampled again from its beginning; unset is as often as it takes, 0 is never."""
    groups_per_shard: Positive = 16
    """A shard is published once it holds that many prompt groups, its batch is done, or its first
    group has waited for a second."""
    over_sampling: Annotated[Number, Field(ge=0)] = 0.0
    """Fraction of a batch that is sampled beyond what `schedule.max_staleness` admits, so that
    groups that are ready take the place of stragglers; needs `schedule.over_age` drop or mask."""
    routed_experts: bool | None = None
    """Record which experts each token went to, in the bus column ragged/routed_experts, and train
    it with the same (routing replay); needs a mixture of experts, and `engines.rollout.kind`
    sglang, and no `stop`. Unset is true where there are these."""
    program: ProgramConfig | None = None
    """Agent that talks to the policy over OpenAI's chat API."""


def check_program(rollout: RolloutConfig) -> None:
    """Refuses an environment without its program, or a program without its environment.

    Raises:
        ValueError: names the key and the remedy.
    """
    is_asked, is_there = rollout.environment == "program", rollout.program is not None
    if is_asked and not is_there:
        raise ValueError(
            "rollout.program.command: is required with rollout.environment = 'program'; add it"
        )
    if is_there and not is_asked:
        raise ValueError(
            f"rollout.environment = {rollout.environment!r}: starts no program, and there is a "
            "table [rollout.program]; use 'program', or remove the table"
        )


class WeightsConfig(Section):
    transport: Transport = "collective"
    """`collective` broadcasts (NCCL or gloo); `files` goes through the run directory."""
    kv_cache: Literal["keep", "recompute"] = "keep"
    """Fate of the key-value cache of running requests in an update. keep: they go on with keys and
    values of the policy before. recompute: it is thrown away, and the new policy reads their tokens
    again, which takes a prefill of all of them."""
    quantize: Literal["none", "fp8"] = "none"
    """`fp8` gives SGLang engines linear layers in 8 bits, with a scale per block of 128 x 128: the
    trainer quantises what it sends, which is half as much, and trains as before. Towers that see
    or hear stay as they are."""
    modules_to_not_convert: list[str] = []
    """Further modules that do with `quantize`, e.g. "model.layers.0" or "o_proj"."""
    bucket_bytes: Bytes = 1 << 30
    """Tensors are sent in flat buckets of at most this size."""
    checksum_every: NonNegative = 10
    """Steps between comparisons of the engines' weights with the trainer's; 0 only at the end."""
    max_logprob_gap: Annotated[Number, Field(gt=0)] | None = None
    """Mean difference, nats, of the engines' logprobs and the trainer's that is rounding; above it
    they compute different models, and the run ends. They are compared once, at each start of the
    actor. Unset it goes by the type: float32 0.001, float16 0.03, bfloat16 0.15, engines with
    numbers of 8 bits or less 0.5. With a large one the difference is only recorded."""
    timeout_s: Positive = 300
    """An engine that does not take an update within this time is fenced."""

    @property
    def quantization_config(self) -> dict[str, Any] | None:
        """The entry of config.json for a model whose weights are such; None if they are plain."""
        if self.quantize == "none":
            return None
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
            "modules_to_not_convert": [*self.modules_to_not_convert, *TOWERS],
        }
