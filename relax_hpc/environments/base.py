"""The face of an environment."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from relax_hpc.environments.session import Session
from relax_hpc.prompts.source import Prompt


class Outcome(NamedTuple):
    """The outcome of an episode."""

    rewards: Mapping[str, float] = {}
    """Rewards by the name of the part; their sum is the reward, without those whose name has a
    slash. Without parts, the job's reward decides."""
    metrics: Mapping[str, float] = {}
    """Other numbers of the episode, by name; the event of a shard has their means over episodes, as
    `rollout/<name>`, and so has TensorBoard."""


class Environment(Protocol):
    """A task for the policy."""

    async def rollout(self, prompt: Prompt, session: Session) -> Outcome:
        """One episode: all that one sibling does with a prompt.

        It may be cancelled at any await, and be begun anew with the session's record. What it
        raises is the reason why this sample has no score, as of a reward that fails.
        """
        ...
