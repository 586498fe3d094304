"""What an environment is."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from relax_hpc.environments.session import Session
from relax_hpc.prompts.source import Prompt


class Outcome(NamedTuple):
    """What came of an episode."""

    rewards: Mapping[str, float] = {}
    """By the name of the part; their sum is the reward. Without parts, the job's reward decides."""
    metrics: Mapping[str, float] = {}
    """Whatever else is worth a number."""


class Environment(Protocol):
    """What the policy is asked to do."""

    async def rollout(self, prompt: Prompt, session: Session) -> Outcome:
        """One episode: all that one sibling does with a prompt.

        It may be cancelled at any await, and be begun anew with the session's record.
        """
        ...
