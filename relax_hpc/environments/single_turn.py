"""One question, one response: the default."""

from relax_hpc.environments.base import Outcome
from relax_hpc.environments.session import Session
from relax_hpc.prompts.source import Prompt


class SingleTurn:
    """Asks the prompt once; the job's reward scores the response."""

    async def rollout(self, prompt: Prompt, session: Session) -> Outcome:
        await session.chat()
        return Outcome()
