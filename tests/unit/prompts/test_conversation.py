"""What a template writes after a reply whose tokens stay what they are."""

import pytest

from relax_hpc.demo import checkpoint
from relax_hpc.prompts.conversation import Conversation

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
KNOWN = [{"role": "user", "content": "1+2="}, {"role": "assistant", "content": "3"}]
MESSAGES = [*KNOWN, {"role": "user", "content": "on"}]
NEXT = "\n<|im_start|>user\non<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("eos", ["<|im_end|>", "<|endoftext|>"])
@pytest.mark.parametrize(
    ("reply", "rest"),
    [
        ("3<|im_end|>", NEXT),
        ("3<|endoftext|>", f"<|im_end|>{NEXT}"),
        ("3", f"<|im_end|>{NEXT}"),
        ("", f"<|im_end|>{NEXT}"),
    ],
)
def test_the_end_of_a_turn_is_there_once_whatever_the_end_of_a_sequence_is(eos, reply, rest):
    """As with a base model of Qwen, and <|im_end|> in `rollout.stop`, which a reply keeps."""
    tokens = checkpoint.tokenizer()
    tokens.chat_template, tokens.eos_token = CHATML, eos
    conversation = Conversation(tokens, chat_template=True)
    assert conversation.following("a test", MESSAGES, 2, conversation.plain(reply)) == rest
    if reply == "3<|im_end|>":
        whole = conversation.text("a test", MESSAGES)
        assert conversation.text("a test", KNOWN[:1]) + reply + rest == whole


def test_text_that_the_next_turn_begins_with_too_stays():
    """Only a special token is the end of a turn: this template puts an ordinary one there."""
    tokens = checkpoint.tokenizer()
    tokens.chat_template = "{% for m in messages %}{{ m.content }};{% endfor %}"
    conversation = Conversation(tokens, chat_template=True)
    assert conversation.following("a test", MESSAGES, 2, conversation.plain("3;")) == ";on;"
