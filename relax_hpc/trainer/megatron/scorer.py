"""Scores trajectories with a fixed model: logprobs under its current weights."""

from collections.abc import Collection, Iterator, Sequence
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel
from torch import Tensor

from relax_hpc.config.model import FrozenPart, LoraConfig, MegatronConfig, ModelConfig
from relax_hpc.data.media.recipe import Recipe, read_view
from relax_hpc.errors import ConfigError
from relax_hpc.runtime.comm.bucket import BucketPlan, Spec
from relax_hpc.runtime.comm.world import World
from relax_hpc.schema import Row
from relax_hpc.trainer.megatron import cpu, grid, hf_stream, hf_weights, model, packing, schedule
from relax_hpc.trainer.megatron.checkpoint_part import load_weights
from relax_hpc.trainer.megatron.encoder import Encoder, encoders_of
from relax_hpc.trainer.megatron.hf_stream import HfGather
from relax_hpc.trainer.megatron.layers import attention_kernels, dense, router
from relax_hpc.trainer.megatron.layers.logprobs import LogprobHead
from relax_hpc.trainer.megatron.packing import MicroBatch
from relax_hpc.trainer.megatron.settings import transformer_config
from relax_hpc.trainer.models.registry import read_architecture
from relax_hpc.trainer.training_engine import Pixels


class MegatronScorer:
    """One rank of a model without gradients or optimizer; its memory is that of the weights.

    All its public methods but the properties are collective. Ranks of a replica (tensor, pipeline
    and context parallel) get the same trajectories.
    """

    _kind: ClassVar[type[model.PackedGPT]] = model.PackedGPT
    _frozen: Collection[FrozenPart] = ()
    """Parts of the model that stay as loaded, while others are trained."""
    _lora: LoraConfig | None = None
    """Adaptation of the model, which itself stays as loaded."""

    def __init__(
        self,
        config: ModelConfig,
        megatron: MegatronConfig,
        world: World,
        device: torch.device,
        *,
        seed: int = 0,
        temperature: float = 1.0,
        random_weights: bool = False,
    ) -> None:
        """Builds the model and loads its weights.

        Needs torch.distributed initialised with the ranks of `world`.

        Args:
            seed: of random values, e.g. of weights that are not loaded.
            random_weights: whether to read only config.json of the model's folder.

        Raises:
            ConfigError: the layout does not fit the ranks or the model; a field of its
                `transformer` is unknown; the checkpoint does not match its config.json.
        """
        if world.size != megatron.layout.world_size:
            raise ConfigError(
                f"{megatron.section}'s ranks (tensor x pipeline x context x data_parallel) = "
                f"{megatron.layout.world_size}: but there are {world.size} ranks; they must agree"
            )
        cpu.install()
        shape = read_architecture(config.path)
        transformer = transformer_config(megatron, shape, config.dtype)
        grid.initialize(megatron.layout, timeout_s=world.timeout_s)
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
        self._megatron = megatron
        self._head = LogprobHead(
            temperature,
            mpu.get_tensor_model_parallel_group(),
            megatron.advanced.float32_logits,
            megatron.advanced.kept_logits_gib,
        )
        self._device = device
        self._shape = shape
        attend = attention_kernels.choose(
            megatron.advanced.attention, device, transformer.params_dtype
        )
        self._chunks = model.build(transformer, shape, device, attend, self._kind)
        self._run_chunks: Sequence[torch.nn.Module] = self._chunks
        """The modules that forward passes go through."""
        self._routed_layers = router.number_layers(self._chunks, shape)
        for chunk in self._chunks:
            dense.set_recomputed(chunk, megatron.advanced.recomputed_passes)
        self._recipe: Recipe | None = None
        self._encoder: Encoder | None = None
        if shape.vision:
            self._recipe = read_view(config.path)
            assert self._recipe is not None, "a model that sees has a family of media"
            first = self._chunks[0]
            encoders = encoders_of(first.vision, first.audio, shape, self._recipe, device)
            self._encoder = Encoder(
                encoders,
                shape.vision,
                device,
                patches_at_once=megatron.advanced.tower_patches,
                features_gib=megatron.advanced.features_gib,
            )
        if random_weights:
            return
        if config.weights is not None:
            load_weights(config.weights, self._chunks)
        else:
            hf_weights.load(self._chunks, config.path)

    @property
    def dp_rank(self) -> int:
        return int(mpu.get_data_parallel_rank())

    def forward_logprobs(
        self, trajectories: Sequence[Row], micro_batches: Sequence[Sequence[int]]
    ) -> list[npt.NDArray[np.float32]]:
        """Returns logprobs of the trajectories' tokens under the current weights.

        Args:
            micro_batches: as for `accumulate`; every trajectory is in one.

        Returns:
            Per trajectory [tokens] nats, 0 for its first token.
        """
        built = [self._build(trajectories, rows) for rows in micro_batches]
        packed = schedule.forward(
            self._run_chunks,
            built,
            lambda hidden, micro_batch: self._logprobs(hidden, micro_batch)[0],
            self._encoder.encode(built, learns=False) if self._encoder else None,
        )
        logprobs: list[npt.NDArray[np.float32]] = [np.empty(0, np.float32)] * len(trajectories)
        for micro_batch, values in zip(built, packed, strict=True):
            documents = np.split(values, np.cumsum(micro_batch.lengths)[:-1])
            for row, document in zip(micro_batch.rows, documents, strict=False):  # last: padding
                logprobs[row] = document
        return logprobs

    def see_by(self, pixels: Pixels) -> None:
        """Sets the source of rows' canonical pixels; not collective."""
        if self._encoder is not None:
            self._encoder.pixels = pixels

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        return (parameter for chunk in self._chunks for parameter in chunk.parameters())

    def weight_specs(self) -> list[Spec]:
        """Returns the specs of `stream_weights`, in that order. Collective."""
        return hf_stream.weight_specs(self._chunks, self._frozen, self._lora)

    def gather(self, bucket_bytes: int, *, to_all: bool = False) -> HfGather:
        """Returns the gather of such buckets to rank 0, or to all. Collective."""
        plan = BucketPlan.of(self.weight_specs(), bucket_bytes)
        return HfGather(self._chunks, plan, to_all=to_all)

    def stream_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields full tensors under Hugging Face names; every rank must iterate to the end."""
        return hf_stream.stream_weights(self._chunks)

    def _build(self, trajectories: Sequence[Row], rows: Sequence[int]) -> MicroBatch:
        multiple_of = grid.tokens_multiple_of(self._megatron.layout)
        return packing.build(
            trajectories, rows, device=self._device, multiple_of=multiple_of,
            layers=self._routed_layers, recipe=self._recipe,
        )  # fmt: skip

    def _logprobs(
        self, hidden: Tensor, micro_batch: MicroBatch, *, entropy_gradient: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Returns [T] logprobs of the tokens, with gradient, and [T] entropy at their sampling.

        On the last stage; context-parallel ranks all get those of the whole micro-batch.
        """
        logprobs, entropy = self._chunks[-1].logprobs(
            hidden,
            grid.own_part(packing.next_tokens(micro_batch.token_ids)),
            self._head._replace(entropy_gradient=entropy_gradient),
        )
        return (
            packing.at_predicted_token(grid.whole(logprobs), micro_batch.is_first),
            packing.at_predicted_token(grid.whole(entropy), micro_batch.is_first),
        )
