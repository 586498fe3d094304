"""Lets a reward use the run's engine pools: text in, text out."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from relax_hpc.config.job_file import read_resolved
from relax_hpc.config.run import RunConfig
from relax_hpc.data.conversation import Conversation
from relax_hpc.data.template import Message
from relax_hpc.errors import ConfigError
from relax_hpc.inference.pool_client import PoolClient, open_pool
from relax_hpc.runtime.paths import RunPaths


class AskedPool:
    """One pool, opened on first use."""

    def __init__(self, run_dir: Path, name: str, model: Path) -> None:
        self._run_dir, self._name, self._model = run_dir, name, model
        self._opening = asyncio.Lock()
        self._opened: tuple[PoolClient, Conversation] | None = None

    async def generate(
        self,
        prompt: str | Sequence[Message],
        *,
        max_new_tokens: int = 512,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> str:
        """Samples one response.

        Args:
            prompt: plain text, or chat messages, rendered by the model's own template.
            max_new_tokens: limit of the response.
            temperature: 0 is greedy.
            seed: of the sampling.

        Returns:
            Text without special tokens.

        Raises:
            EngineError: no engine of the pool answered within `launch.advanced.peer_timeout_s`.
        """
        client, conversation = await self._open()
        if isinstance(prompt, str):
            given = conversation.plain(prompt)
        else:
            given = conversation.encode("what a reward asks", prompt)
        done = await client.complete(given, max_new_tokens, temperature=temperature, seed=seed)
        return conversation.decode(done.token_ids)

    async def _open(self) -> tuple[PoolClient, Conversation]:
        async with self._opening:
            if self._opened is None:
                from relax_hpc.data import tokenizer as tokenizers

                tokenizer = await asyncio.to_thread(tokenizers.load, self._model)
                stop: Any = tokenizer.eos_token_id
                client = open_pool(self._run_dir, self._name, stop_token=stop)
                await client.__aenter__()  # to the end of the process
                self._opened = client, Conversation(tokenizer, chat_template=True)
            return self._opened


class Engines:
    """The pools for a reward that takes `engines`: `await engines["judge"].generate(...)`."""

    def __init__(self, run_dir: Path) -> None:
        """Reads the job's pools, without a request.

        Raises:
            ConfigError: not the directory of a run with engines.
        """
        config = read_resolved(RunPaths(run_dir).config)
        if not isinstance(config, RunConfig):
            raise ConfigError(f"{run_dir}: a job with [sft] has no engines")
        self._pools = {
            name: AskedPool(run_dir, name, pool.model or config.model.path)
            for name, pool in config.engines.items()
        }

    def __getitem__(self, name: str) -> AskedPool:
        if name not in self._pools:
            raise KeyError(f"the job has no pool {name!r}; it has {', '.join(self._pools)}")
        return self._pools[name]
