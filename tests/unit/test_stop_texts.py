"""Texts that end a response: found wherever chunks and tokens are cut."""

import pytest

from relax_hpc.prompts.stop_texts import StopTexts

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


def test_what_was_looked_at_is_not_decoded_again_and_again():
    decoded = []
    stop = StopTexts(lambda tokens: decoded.append(len(tokens)) or "", ["abcd"])
    assert end_by_chunks(stop, [0] * 10_000, 50) is None
    assert max(decoded) < 50 + 20
