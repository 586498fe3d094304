"""A row counts as cut off where a limit of the run ended a reply of it, and no own one."""

import asyncio

import pytest
from test_episodes import Engine, session_of, tokens

from relax_hpc.environments.record import Record, record_of, sequences
from relax_hpc.environments.session import Reply
from relax_hpc.rewards.contract import Score
from relax_hpc.roles.rollout.episodes import Episode, rows_of
from relax_hpc.schema import FinishReason

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
LONG, FULL, SHORT = "1234567", "1234<|im_end|>", "12<|im_end|>"
RUN = 5
"""Tokens of a reply; those of LONG are 7."""

__all__ = ["tokens"]


def played(tokens, replies, settings, *, record=None, room=1000, says=None):
    """One episode: how its replies ended, as the environment sees it; its prompt and record."""
    record = Record() if record is None else record
    engine = Engine(tokens, *replies) if says is None else says
    prompt, _ = session_of(tokens, engine, Record())
    limit = len(prompt.token_ids) + room
    _, session = session_of(tokens, engine, record, max_tokens=limit)
    session.how = session.how._replace(max_new_tokens=RUN)

    async def run():
        found: list[Reply] = []
        for number, each in enumerate(settings):
            more = [*session.messages, {"role": "user", "content": "on"}] if number else None
            found.append(await session.chat(more, **each))
        return [reply.finish for reply in found]

    return asyncio.run(run()), prompt, record


@pytest.mark.parametrize(
    ("replies", "settings", "ends", "finish"),
    [
        ([LONG], [{}], [LENGTH], LENGTH),
        ([SHORT], [{}], [STOP], STOP),
        ([LONG, SHORT], [{}, {}], [LENGTH, STOP], LENGTH),
        ([SHORT, LONG], [{}, {}], [STOP, LENGTH], LENGTH),
        ([FULL, SHORT], [{}, {}], [STOP, STOP], STOP),
        ([LONG], [{"max_new_tokens": 2}], [LENGTH], STOP),
        ([LONG, SHORT], [{"max_new_tokens": 2}, {}], [LENGTH, STOP], STOP),
        ([LONG], [{"max_new_tokens": RUN}], [LENGTH], LENGTH),
        ([LONG], [{"max_new_tokens": 6}], [LENGTH], LENGTH),
        ([LONG], [{"ignore_eos": True}], [LENGTH], STOP),
    ],
)
def test_what_limit_ended_a_reply_says_whether_its_row_was_cut(
    tokens, replies, settings, ends, finish
):
    found, prompt, record = played(tokens, replies, settings)
    assert found == ends
    [made] = sequences(record)
    assert made.finish is finish
    # The same of a record that comes back from the bus: the environment asks again.
    rows = list(rows_of(0, 0, prompt, 1, Episode(record, Score(0.0))))
    again = record_of(rows)
    [kept] = sequences(again)
    assert kept.finish is finish
    nobody = Engine(tokens)
    assert played(tokens, [], settings, record=again, says=nobody)[0] == ends
    [made] = sequences(again)
    assert made.finish is finish and not nobody.asked


def test_a_conversation_that_no_room_is_left_in_was_cut(tokens):
    """The first reply has room for 3 tokens; the last one finds none, and is in no row."""
    for settings in ({}, {"max_new_tokens": 4}, {"ignore_eos": True}):
        found, _, record = played(tokens, [LONG], [settings], room=3)
        assert found == [LENGTH] and sequences(record)[0].finish is LENGTH
    found, _, record = played(tokens, [SHORT], [{}, {}], room=4)
    assert found == [STOP, LENGTH] and sequences(record)[0].finish is LENGTH
