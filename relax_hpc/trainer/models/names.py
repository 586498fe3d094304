"""Maps Hugging Face's tensors to Megatron-core's parameters and their shards.

Megatron-core packs several matrices into one (query, key and value; gate and up) and splits it over
tensor-parallel ranks. A rank's content is described once, as pieces: loading copies them one way,
exporting the other.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

Shape = tuple[int, ...]
Layout = Literal["whole", "rows", "columns", "gate_up"]
"""How ranks share it: each all of it; by dimension 0, in `groups` dealt in turn; by dimension 1; or
by dimension 0, in as many groups as there are ranks."""


class TensorPiece(NamedTuple):
    """A piece of a Hugging Face tensor in a shard: a range of one dimension, all of the others."""

    source: int
    """Index of the tensor in `Parameter.hf`."""
    dim: int
    start: int
    """First index in the Hugging Face tensor."""
    target: int
    """First index in the shard."""
    length: int


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of Megatron-core, and the tensors that it is packed from."""

    core: tuple[str, ...]
    """Names in the model; a rank fills those that it has."""
    hf: Mapping[str, Shape]
    """Hugging Face's names, with the whole shapes. `{expert}` stands for the expert's number."""
    layout: Layout = "whole"
    groups: int = 1
    """Query groups, each with its queries, key and value side by side."""
    num_experts: int = 0
    """Number of experts, all of this shape, stacked and shared by expert-parallel ranks."""
    fused: str = ""
    """Name of all experts as one tensor [experts, rows of all of `hf`, columns], in checkpoints
    that have it."""
    transposed: bool = False
    """Whether the fused tensor is [experts, columns, rows of all of `hf`]."""

    def within(self, core: str, hf: str) -> "Parameter":
        """Returns a copy under prefixes."""
        return replace(
            self,
            core=tuple(core + name for name in self.core),
            hf={hf + name: shape for name, shape in self.hf.items()},
            fused=self.fused and hf + self.fused,
        )

    def rename(self, old: str, new: str) -> "Parameter":
        """Returns a copy for folders with another prefix."""

        def name(of: str) -> str:
            return new + of.removeprefix(old) if of.startswith(old) else of

        hf = {name(of): shape for of, shape in self.hf.items()}
        return replace(self, hf=hf, fused=self.fused and name(self.fused))

    def names(self) -> Iterator[str]:
        """Yields the names of tensors in a checkpoint, expert by expert."""
        for expert in range(self.num_experts or 1):
            for name in self.hf:
                yield name.format(expert=expert)

    def shard_shape(self, size: int) -> Shape:
        """Returns the shape of a rank's shard, for one expert."""
        (_, *others), rows = next(iter(self.hf.values())), self._rows
        if self.layout == "whole":
            return (rows, *others)
        if self.layout == "columns":
            return (rows, others[0] // size)
        return (rows // size, *others)

    def pieces(self, rank: int, size: int) -> Iterator[TensorPiece]:
        if self.layout == "columns":
            (_, columns), *_ = self.hf.values()
            share = columns // size
            yield TensorPiece(0, 1, rank * share, 0, share)
            return
        if self.layout == "whole":
            rank, size = 0, 1
        groups = size if self.layout == "gate_up" else self.groups
        first, last = self._rows * rank // size, self._rows * (rank + 1) // size
        at = 0
        for group in range(groups):
            for source, shape in enumerate(self.hf.values()):
                length = shape[0] // groups
                start, stop = max(first, at), min(last, at + length)
                if start < stop:
                    yield TensorPiece(
                        source, 0, group * length + start - at, start - first, stop - start
                    )
                at += length

    @property
    def fused_shape(self) -> Shape:
        (_, *others), *_ = self.hf.values()
        each = (self._rows, *others)
        return (self.num_experts, *(reversed(each) if self.transposed else each))

    @property
    def _rows(self) -> int:
        return sum(shape[0] for shape in self.hf.values())


@dataclass(frozen=True, slots=True)
class Adapter:
    """The two factors that low-rank adaptation adds to a parameter, under peft's names."""

    a: Parameter
    """[rank, in] of each adapted matrix, stacked."""
    b: Parameter
    """[out, rank], in the rows of the parameter; rows of matrices without adapter stay 0."""
    sources: tuple[int, ...]
    """Indices of the adapted matrices in `Parameter.hf`."""

    @classmethod
    def of(cls, parameter: Parameter, rank: int, targets: Collection[str]) -> "Adapter | None":
        """Returns the adapter of a parameter; None if none of its matrices is a target.

        Args:
            targets: names of matrices of the language model's layers, e.g. q_proj.
        """
        names = list(parameter.hf)
        sources = tuple(n for n, name in enumerate(names) if _is_target(name, targets))
        [*_, core] = parameter.core
        if not sources or parameter.num_experts or not core.startswith("decoder.layers."):
            return None
        of_a, of_b = {}, {}
        for number, (name, (rows, columns)) in enumerate(parameter.hf.items()):
            place = name.removesuffix("weight")
            of_b[f"{place}lora_B.weight"] = (rows, rank)
            if number in sources:
                of_a[f"{place}lora_A.weight"] = (rank, columns)
        place, by_columns = core.removesuffix("weight"), parameter.layout == "columns"
        return cls(
            Parameter((f"{place}lora_a",), of_a, "columns" if by_columns else "whole"),
            replace(
                parameter,
                core=(f"{place}lora_b",),
                hf=of_b,
                layout="whole" if by_columns else parameter.layout,
            ),
            sources,
        )


def _is_target(name: str, targets: Collection[str]) -> bool:
    *_, matrix, kind = name.rsplit(".", 2)
    return kind == "weight" and matrix in targets
