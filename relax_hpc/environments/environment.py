"""Defines the interface of an environment."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from relax_hpc.data.source import Prompt
from relax_hpc.environments.session import Session


class Outcome(NamedTuple):
    rewards: Mapping[str, float] = {}
    """Rewards by name; they add up to the reward, except names with a slash. If empty, the job's
    reward scores the episode."""
    metrics: Mapping[str, float] = {}
    """Other numbers of the episode; shard events and TensorBoard show their means as
    `rollout/<name>`."""


class Environment(Protocol):
    """A task for the policy."""

    async def rollout(self, prompt: Prompt, session: Session) -> Outcome:
        """Runs one episode: everything one sibling does with a prompt.

        It may be cancelled at any await, and restarted with the session's record. An exception
        leaves this sample without a score, as a failed reward does.
        """
        ...


class SingleTurn:
    """Asks the prompt once; the job's reward scores the response."""

    async def rollout(self, prompt: Prompt, session: Session) -> Outcome:
        await session.chat()
        return Outcome()
