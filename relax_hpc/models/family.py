"""The declaration of an architecture; the file of a new one makes one `Family`."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from relax_hpc.models.architecture import Architecture
from relax_hpc.models.config_json import ConfigJson
from relax_hpc.models.names import Parameter


@dataclass(frozen=True, slots=True)
class Family:
    model_type: str
    """Name of the family in config.json."""
    read: Callable[[ConfigJson], Architecture]
    """Refuses, with a ConfigError, what the trainer would compute otherwise than the model."""
    transformer: Callable[[Architecture], dict[str, Any]]
    """Fields of Megatron-core's TransformerConfig that the model decides."""
    defaults: Callable[[Architecture], dict[str, Any]]
    """Fields that the job may set otherwise."""
    parameters: Callable[[Architecture], Iterator[Parameter]]
    """The model's parameters, in the order in which weights are exported; layers by their number in
    the model."""
    fuses_experts: bool = False
    """Whether the hub's folders have all experts of a layer in one tensor, `Parameter.fused`."""
    kept: tuple[str, ...] = ()
    """Beginnings of tensors of a folder that are of no part that learns: an export has them as they
    are."""
