"""Texts that end a reply: those of the run, of a held-out set, and of an environment."""

import asyncio

import numpy as np
import pytest
from episode_fakes import Numbers, answer, episodes
from roles.role_fakes import config

from relax_hpc.data.conversation import StopTexts
from relax_hpc.data.source import Prompt
from relax_hpc.environments.record import EpisodeRecord
from relax_hpc.environments.session import Session
from relax_hpc.inference.generation import Draft, Sampling
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
        how = Sampling(1.0, 50, max_tokens=1000, end=Numbers().stop(["run"]))
        made = Session(
            PROMPT, EpisodeRecord(), Engine(), Numbers(), how, group=0, episode=0, seed=1
        )
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
    made = draft.finish(FinishReason.STOP)
    assert (made.token_ids, made.routed_experts) == ([1, 2], None)


PIECES = ["a", "\n", "Q", ":", "", "\nQ", ": b", "<|end|>"]


def decode(token_ids):
    return "".join(PIECES[token] for token in token_ids)


def end_by_chunks(stop, token_ids, size):
    """The end as a client asks for it, chunk by chunk."""
    for seen in range(0, len(token_ids), size):
        if (end := stop(token_ids[: seen + size], seen)) is not None:
            return end
    return None


@pytest.mark.parametrize("size", [1, 2, 3, 64])
@pytest.mark.parametrize(
    ("texts", "token_ids", "end"),
    [
        (["\nQ:"], [0, 1, 2, 3, 0, 0], 4),
        (["\nQ:"], [0, 5, 6, 0], 3),  # in the middle of a token, which is kept
        (["\nQ:"], [0, 5, 4, 4, 3, 0], 5),  # some tokens show nothing
        (["\nQ:"], [0, 5, 0, 3], None),
        (["\nQ:", "aa"], [1, 0, 0, 1, 2, 3], 3),  # the first to come
        (["<|end|>"], [0, 7], 2),
        (["a"], [0, 0, 0], 1),
        (["a", "x" * 90], [0, 0, 0], 1),
    ],
)
def test_a_response_ends_with_the_token_that_completes_a_text(texts, token_ids, end, size):
    stop = StopTexts(decode, texts)
    assert end_by_chunks(stop, [1] * 100 + token_ids, size) == (end and 100 + end)
