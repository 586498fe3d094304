"""Episodes without engines: what stands in for them, and a rollout loop put together of it."""

from types import SimpleNamespace

from relax_hpc.bus.layout import Deal, Deals
from relax_hpc.data.conversation import StopTexts
from relax_hpc.environments.rewards.contract import Score
from relax_hpc.environments.session import SingleTurn
from relax_hpc.roles.rollout import loop as rollout
from relax_hpc.roles.rollout.episodes import Episodes, Grouper
from relax_hpc.roles.rollout.heldout import Begun, Due, Evaluator
from relax_hpc.roles.rollout.skips import TaskSkips
from relax_hpc.schema import FinishReason


def answer(draft, token_ids, logprobs, version_runs, finish=FinishReason.STOP, experts=None):
    """Puts a response into a draft; what the sampler returns of it."""
    draft.token_ids += token_ids
    draft.logprobs += logprobs
    draft.version_runs += version_runs
    return SimpleNamespace(finish=finish, routed_experts=experts)


class Numbers:
    """A conversation in which the text of tokens is their numbers."""

    def decode(self, token_ids):
        return " ".join(map(str, token_ids))

    def opens_thought(self, token_ids):
        return False

    def ends_turn(self, token_ids):
        return False

    def stop(self, texts):
        return StopTexts(self.decode, texts) if texts else None


class Prompts:
    """Prompts by their ordinals."""

    def __init__(self, given):
        self._given = given

    async def fetch(self, ordinal):
        return self._given[ordinal]


class Board:
    """Keeps what evaluations leave; of those before it knows none, or those of the last
    policy of so many steps."""

    def __init__(self, *, over=(), size=1):
        self.added, self.over, self.size = [], over, size

    def list_begun(self, name):
        return Begun([Due(name, "after", steps) for steps in self.over], [])

    def begin(self, due):
        return []

    def keep(self, due, rows):
        pass

    def add(self, due, share, rows):
        self.added.append((due, share, rows))


def episodes(config, sampler, score, environment=None, conversation=None, max_tokens=1 << 20):
    """Episodes scored by a function of a response's tokens and the prompt."""

    async def scores(group):
        tokens = [[int(n) for n in sample.response.split()] for sample in group]
        given = [score(response, sample) for response, sample in zip(tokens, group, strict=True)]
        return [each if isinstance(each, Score) else Score(each) for each in given]

    environment, conversation = environment or SingleTurn(), conversation or Numbers()
    return Episodes(config, environment, sampler, conversation, scores, max_tokens=max_tokens)


class Folder:
    """The one folder of a rollout task, of `size` tasks: it takes every group."""

    committed = frozenset()

    def __init__(self, task=0, size=1):
        self._task, self._deals = task, Deals([Deal(0, size)])

    def list_owed(self, *, start):
        found = self._deals.guids(self._task, start=start)
        return (guid for guid in found if guid not in self.committed)

    def owe_again(self, again):
        return []

    def collect(self, retired_guid_below): ...

    def lots(self, groups):
        return [groups]


class NoEnd:
    """For jobs whose end nobody announces."""

    def begin(self, *, start): ...
    def is_near(self):
        return False

    def note(self, version, *, idle): ...
    def keep(self, guids, held): ...
    def close(self): ...


def run(config, prompts, heldout, sampler, score, folders, credits, events, end=None):
    """The loop of a rollout task; its held-out prompts are those of its first set."""
    made = episodes(config, sampler, score)
    [name] = config.eval
    shares = {name: heldout}
    group, evaluator = Grouper(config, Prompts(prompts), made), Evaluator(
        config, shares, made, events, Board(over=() if heldout else (config.num_steps,))
    )  # fmt: skip
    end, skips = end or NoEnd(), TaskSkips(config, folders)
    return rollout.run(config, sampler, group, evaluator, folders, credits, events, end, skips)
