"""Llama's chat template: one beginning of text, exact tokens of each turn, its three ends."""

import json

import llamas
import pytest

from relax_hpc.config.hf_config import ends_of
from relax_hpc.data import tokenizer as tokenizers
from relax_hpc.data.conversation import Conversation
from relax_hpc.data.documents import ChatTemplate
from relax_hpc.errors import ConfigError

KNOWN = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+2="}]
REPLY = {"role": "assistant", "content": "3"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder, tokens = tmp_path_factory.mktemp("model"), llamas.tokenizer()
    tokens.save_pretrained(folder)
    ends = [tokens.convert_tokens_to_ids(t) for t in (llamas.TURN_END, llamas.MESSAGE_END)]
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 1}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return folder


@pytest.fixture(scope="module")
def tokens(folder):
    return tokenizers.load(folder)


@pytest.fixture(scope="module")
def conversation(tokens):
    return Conversation(tokens, chat_template=True)


def theirs(tokens, messages, **options):
    return tokens.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=True, **options
    )["input_ids"]


@pytest.mark.parametrize("tools", [None, [TOOL]])
def test_a_prompt_begins_once_and_is_that_of_transformers(tokens, conversation, tools):
    found = conversation.encode("a test", KNOWN, tools)
    assert found == theirs(tokens, KNOWN, tools=tools)
    assert found.count(tokens.bos_token_id) == 1 and found[0] == tokens.bos_token_id
    assert ("add" in tokens.decode(found)) == bool(tools)
    dated = conversation.text("a test", KNOWN, tools, {"date_string": "1 Jan 2025"})
    assert "Be brief." in dated and "Today Date: 1 Jan 2025" in dated


def test_a_prompt_without_a_template_begins_once_too(tokens):
    plain = Conversation(tokens, chat_template=False)
    found = plain.encode("a test", [{"role": "user", "content": "1+2="}])
    assert found == [tokens.bos_token_id, *tokens.encode("1+2=", add_special_tokens=False)]
    assert tokens.bos_token_id not in plain.plain("7+5=")


@pytest.mark.parametrize("role", ["user", "tool"])
@pytest.mark.parametrize("reply", ["3<|eot_id|>", "3"])
def test_a_conversation_that_goes_on_has_the_tokens_of_the_whole(tokens, conversation, role, reply):
    messages = [*KNOWN, REPLY, {"role": role, "content": "on"}]
    prompt, sampled = conversation.encode("a test", KNOWN), conversation.plain(reply)
    rest = conversation.following("a test", messages, 3, prompt + sampled)
    assert prompt + sampled + conversation.plain(rest) == theirs(tokens, messages)


def test_a_reply_that_ended_on_its_message_is_not_ended_twice(folder, tokens, conversation):
    messages = [*KNOWN, REPLY, {"role": "tool", "content": "4"}]
    sampled = conversation.plain("3<|eom_id|>")
    assert sampled[-1] == tokens.convert_tokens_to_ids(llamas.MESSAGE_END)
    cut_off = conversation.plain("3<|start_header_id|>")  # is no end, though the template has it
    rest = conversation.following("a test", messages, 3, cut_off)
    assert rest.startswith("<|eot_id|><|start_header_id|>ipython")
    # Llama 3.1's template itself says <|eom_id|> after calls of built-in tools.
    knowing = tokens.chat_template + "{#- <|eom_id|> #}"
    for template, own_end in ((tokens.chat_template, "<|eot_id|>"), (knowing, "")):
        other = tokenizers.load(folder)
        other.chat_template = template
        rest = Conversation(other, chat_template=True).following("a test", messages, 3, sampled)
        assert rest.startswith(f"{own_end}<|start_header_id|>ipython<|end_header_id|>\n\n4<|eot")


def test_ends_are_those_of_both_files(folder, tokens, tmp_path):
    named = [tokens.convert_tokens_to_ids(t) for t in (llamas.TURN_END, llamas.MESSAGE_END)]
    assert ends_of(folder) == {1, *named}
    assert ends_of(tmp_path) == frozenset()
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"generation_config\.json.* download it again"):
        ends_of(tmp_path)


def test_a_document_is_trained_on_what_the_assistant_wrote_and_its_ends(tokens):
    turns = [*KNOWN, REPLY, {"role": "user", "content": "4+5="}, REPLY | {"content": "9"}]
    made = ChatTemplate(tokens).encode("a test", turns, None, last_only=False)
    whole = tokens.apply_chat_template(turns, return_dict=True)["input_ids"]
    assert made.token_ids == whole
    trained = [t for t, flag in zip(whole, made.loss_mask, strict=True) if flag]
    assert tokens.decode(trained) == "3<|eot_id|>9<|eot_id|>"
