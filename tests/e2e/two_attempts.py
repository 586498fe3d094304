"""An environment whose episodes have two sequences, as a user would name it in a job."""

from relax_hpc.environments.session import Outcome


class TwoAttempts:
    """Asks the same question again, without the first answer in sight."""

    async def rollout(self, prompt, session):
        first = await session.chat()
        second = await session.chat(prompt.messages)
        right = [reply.text.strip() == str(prompt.answer) for reply in (first, second)]
        return Outcome({"right": sum(right) / 2}, {"agree": first.text == second.text})
