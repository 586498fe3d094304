"""Texts that end a reply: those of the run, of a held-out set, and of an environment."""

import asyncio

import numpy as np
import pytest
from episode_fakes import Numbers, answer, episodes
from roles.role_fakes import config

from relax_hpc.engines.response import Draft
from relax_hpc.environments.record import Record
from relax_hpc.environments.session import Session
from relax_hpc.errors import ConfigError, RelaxError
from relax_hpc.prompts.source import Prompt
from relax_hpc.sampling.how import How
from relax_hpc.schema import FinishReason

PROMPT = Prompt(0, [7], "", [{"role": "user", "content": "7"}], where="a test")


def ends_of(*stops, **said):
    """The ends that an engine is told, of a reply for each of these `stop`s of an environment."""
    found = []

    class Engine:
        async def sample(self, given, draft, how, *, seed, homes):
            found.append(how.end)
            return answer(draft, [3], [-1.0], [(0, 0)])

    async def run(stop):
        how = How(1.0, 50, 1000, end=Numbers().stop(["run"]))
        made = Session(PROMPT, Record(), Engine(), Numbers(), how, group=0, episode=0, seed=1)
        await made.chat(stop=stop, **said)

    for stop in stops:
        asyncio.run(run(stop))
    return found


def ending(end):
    return end and end._texts


def test_a_reply_ends_with_a_text_of_the_run_unless_the_environment_says_others():
    assert list(map(ending, ends_of(None, ["</a>", "b"], []))) == [("run",), ("</a>", "b"), None]


def test_a_reply_that_nothing_else_ends_ends_with_a_text_that_is_said_with_it():
    assert list(map(ending, ends_of(None, ["b"], ignore_eos=True))) == [None, ("b",)]


@pytest.mark.parametrize("stop", ["</a>", [""], ["a", 3]])
def test_an_environment_that_says_no_list_of_texts_is_told_so(stop):
    with pytest.raises(RelaxError, match=r"a test: an environment says stop = .*; give a list of"):
        ends_of(stop)


def test_a_held_out_set_stops_as_training_does_unless_it_says_otherwise():
    sets = {
        "as": {"path": "p"},
        "none": {"path": "p", "stop": []},
        "own": {"path": "p", "stop": ["b"]},
    }
    made = config(rollout__stop=["run"], eval=sets)
    each = episodes(made, None, None)
    assert ending(each.how(1.0).end) == ("run",)
    ends = {name: ending(each.how_heldout(settings).end) for name, settings in made.eval.items()}
    assert ends == {"as": ("run",), "none": None, "own": ("b",)}
    assert episodes(config(), None, None).how(1.0).end is None


def test_experts_of_a_reply_that_is_cut_are_on_no_record():
    """Those that came with a part of it before it was broken off are of other tokens."""
    draft = Draft([1, 2, 3, 4], [-1.0] * 4, [(0, 5)], [np.zeros((3, 2), np.int16)])
    draft.cut(2)
    made = draft.finished(FinishReason.STOP)
    assert (made.token_ids, made.routed_experts) == ([1, 2], None)


def test_texts_and_routing_replay_are_refused_together():
    with pytest.raises(
        ConfigError, match=r"rollout.routed_experts = true: .*\(rollout.stop\); use"
    ):
        config(
            rollout__stop=["a"],
            rollout__routed_experts=True,
            engines={"rollout": {"kind": "sglang"}},
        )
    with pytest.raises(ConfigError, match=r"rollout.stop.0 = '': "):
        config(rollout__stop=[""])
