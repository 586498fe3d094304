"""The chat API: what was sampled stays as it is, fields are obeyed or refused, strangers get
nothing."""

import asyncio
import json

import aiohttp
import pytest
from chat_fakes import ASKED, Engine, served, session_of, spelled, tokens_of

from relax_hpc.environments.chat_api.messages import ToolCall, parse
from relax_hpc.environments.record import EpisodeRecord, sequences
from relax_hpc.errors import EngineLostError

ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


@pytest.fixture(scope="module")
def tokens():
    return tokens_of()


def encoded(tokens, text):
    return tokens.encode(text, add_special_tokens=False)


async def test_the_second_turn_goes_on_from_the_tokens_that_were_sampled(tokens):
    """`spelled` replies have other tokens than their text would be encoded to."""
    engine, record = Engine(tokens, "The sum is 3", "yes"), EpisodeRecord()
    async with served(session_of(engine, record)) as (_, client):
        first = await client.message([ASKED])
        assert first == {"role": "assistant", "content": "The sum is 3"}
        sent = first | {"refusal": None, "annotations": [], "tool_calls": None}
        assert await client.message([ASKED, sent, {"role": "user", "content": "sure?"}])
    sampled = spelled(tokens, "The sum is 3")
    assert sampled != encoded(tokens, "The sum is 3<|im_end|>"), "or nothing is shown here"
    (first, *_), (second, *_) = engine.asked
    more = encoded(tokens, "\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n")
    assert second == [*first, *sampled, *more]
    [made] = sequences(record)
    last = spelled(tokens, "yes")
    assert made.token_ids.tolist() == [*second, *last]
    mask = [0] * len(first) + [1] * len(sampled) + [0] * len(more) + [1] * len(last)
    assert made.loss_mask.tolist() == mask


async def test_calls_of_tools_are_told_from_the_text_and_go_back_as_they_were_sampled(tokens):
    engine, record = Engine(tokens, f"I add. {CALL}", "3"), EpisodeRecord()
    async with served(session_of(engine, record)) as (_, client):
        status, made = await client.post([ASKED], tools=[ADD])
        [choice] = made["choices"]
        assert (status, choice["finish_reason"]) == (200, "tool_calls")
        message = choice["message"]
        [call] = message["tool_calls"]
        assert message["content"] == "I add." and call["function"]["name"] == "add"
        assert json.loads(call["function"]["arguments"]) == {"a": 1, "b": 2}
        call["function"]["arguments"] = '{"b":2,"a":1}'  # read and written again
        gave = {"role": "tool", "tool_call_id": call["id"], "name": "add", "content": "3"}
        await client.message([ASKED, message, gave], tools=[ADD])
    (first, *_), (second, *_) = engine.asked
    assert '# Tools\n{"type": "function", "function": {"name": "add"' in tokens.decode(first)
    sampled = spelled(tokens, f"I add. {CALL}")
    assert second[: len(first) + len(sampled)] == [*first, *sampled]
    assert tokens.decode(second[len(first) + len(sampled) :]) == (
        "\n<|im_start|>user\n<tool_response>3</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert len(sequences(record)) == 1


FIND = {"type": "function", "function": {"name": "find", "parameters": {"properties": {
    "text": {"type": "string"}, "most": {"type": "integer"}, "exact": {"type": "boolean"},
    "in": {"type": "array"},
}}}}  # fmt: skip
TAGGED = """<tool_call>
<function=find>
<parameter=text>
12
x < y
</parameter>
<parameter=most>
3
</parameter>
<parameter=exact>True</parameter>
<parameter=in>["a", 1]</parameter>
<parameter=new>7</parameter>
</function>
</tool_call>"""


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("no call", "no call", []),
        (f"x{CALL} y {CALL}", "x y", [ToolCall("add", {"a": 1, "b": 2})] * 2),
        ('<tool_call>{"name": "f", "arguments": {"a": "1\n2"}}</tool_call>', "",
         [ToolCall("f", {"a": "1\n2"})]),
        (f"<tool_call>f</tool_call>{CALL}", "<tool_call>f</tool_call>",
         [ToolCall("add", {"a": 1, "b": 2})]),
        (f"<think>{CALL}</think>no", f"<think>{CALL}</think>no", []),
        (f"I look. {TAGGED}", "I look.",
         [ToolCall("find", {"text": "12\nx < y", "most": 3, "exact": True, "in": ["a", 1],
                            "new": "7"})]),
        ("<tool_call><function=find><parameter=most>few</parameter></function></tool_call>", "",
         [ToolCall("find", {"most": "few"})]),
        ('{"name": "add", "parameters": {"a": 1}}', "", [ToolCall("add", {"a": 1})]),
        ('\n[{"name": "add", "arguments": {"a": 1}}, {"name": "find", "arguments": {}}] ', "",
         [ToolCall("add", {"a": 1}), ToolCall("find", {})]),
        ('<think>so</think>{"name": "add", "parameters": {}}', "<think>so</think>",
         [ToolCall("add", {})]),
        *((text, text, []) for text in (
            '[{"name": "add", "arguments": {}}, {"name": "other", "arguments": {}}]',
            'I say {"name": "add", "parameters": {}}',
            '{"name": "add", "age": 3}', "[]", "3", '{"name": "add", "parameters": 3}',
        )),
    ],
)  # fmt: skip
def test_calls_are_read_leniently_in_the_form_of_each_family_and_what_cannot_be_read_stays(
    text, content, calls
):
    """Qwen3-Coder's tags; Llama's and Mistral's JSON, which is an answer if no tool has the
    name."""
    assert parse(text, [ADD, FIND]) == (content, calls)


@pytest.mark.parametrize(
    "tag",
    ["use </think> here", "a </tool_call> b", "</parameter> x", '"\\"}}</tool_call>'],
)  # fmt: skip
@pytest.mark.parametrize("thought", ["", "<think>or <tool_call> so</think>", f"so {CALL}</think>"])
def test_marks_inside_an_argument_are_data_in_every_form(tag, thought):
    """R10."""
    want = ToolCall("find", {"text": f"{tag}\n{tag}"})
    body = json.dumps({"name": "find", "arguments": want.arguments})
    texts = json.dumps({"name": "find", "arguments": json.dumps(want.arguments)})
    tagged = f"<function=find>\n<parameter=text>\n{tag}\n{tag}\n</parameter>\n</function>"
    for call in (body, texts, body.replace("\\n", "\n"), tagged, tagged[: -len("</function>")]):
        for end in ("\n</tool_call>", "\n</tool_call> ", ""):
            said = parse(f"{thought}I look.<tool_call>\n{call}{end}", [ADD, FIND])
            assert said == (f"{thought}I look.", [want]), call
    twice = f"<tool_call>{body}</tool_call> and <tool_call>{tagged}</tool_call>"
    assert parse(f"{thought}{twice}", [FIND]).calls == [want, want]
    assert parse(f"{thought}[{body}, {body}]", [FIND]) == (thought, [want, want])


async def test_without_tools_or_with_tool_choice_none_a_call_is_text(tokens):
    async with served(session_of(Engine(tokens, CALL, CALL))) as (_, client):
        assert (await client.message([ASKED]))["content"] == CALL
        said = await client.message([ASKED], tools=[ADD], tool_choice="none")
        assert said == {"role": "assistant", "content": CALL}


async def test_tools_of_the_prompt_are_there_unless_a_request_has_others(tokens):
    engine, record = Engine(tokens, CALL, "a", "b"), EpisodeRecord()
    async with served(session_of(engine, record, tools=[ADD])) as (_, client):
        first = await client.message([ASKED])
        assert first["tool_calls"]
        more = {"role": "tool", "content": "3"}
        await client.message([ASKED, first, more], tools=[ADD])
        await client.message([ASKED, first, more], tools=[])
    assert "# Tools" not in tokens.decode(engine.asked[2][0])
    assert len(sequences(record)) == 2, "others begin a sequence of their own"


async def test_two_replies_of_the_same_words_are_told_by_what_they_answer(tokens):
    """The same call, written in two ways: what follows each goes on from it."""
    other, gave = {"role": "user", "content": "2+1="}, {"role": "tool", "content": "3"}
    engine, record = Engine(tokens, CALL, CALL.replace("\n", ""), "x", "y"), EpisodeRecord()
    async with served(session_of(engine, record, tools=[ADD])) as (_, client):
        first, second = await client.message([ASKED]), await client.message([other])
        calls = [each.pop("tool_calls") for each in (first, second)]
        assert first == second and calls[0][0]["function"] == calls[1][0]["function"]
        await client.message([ASKED, first | {"tool_calls": calls[0]}, gave])
        await client.message([other, second | {"tool_calls": calls[1]}, gave])
    assert len(sequences(record)) == 2


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"temperature": 1.0}, "temperature = 1.0: this episode has 0.7; leave it out"),
        ({"seed": 1}, "seed = 1: is not known here; leave it out"),
        ({"response_format": {"type": "json_object"}}, "response_format = {'type': 'json_object'}"),
        ({"max_tokens": 0}, "max_tokens = 0: is no number of tokens; use 1 or more"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens differ"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content = None: is no"),
        ({"messages": [ASKED | {"name": "Ann"}]}, "messages[0].name: the chat template does not"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url",
          "image_url": {"url": "data:image/png;base64,AA=="}}]}]}, "shows media in a history"),
    ],
)  # fmt: skip
async def test_a_field_that_is_not_obeyed_is_refused_in_a_line_and_nothing_is_sampled(
    tokens, fields, said
):
    engine = Engine(tokens, "3")
    async with served(session_of(engine)) as (_, client):
        status, made = await client.post(**{"messages": [ASKED]} | fields)
        assert (status, made["error"]["type"]) == (400, "invalid_request_error")
        assert said in made["error"]["message"] and "\n" not in made["error"]["message"]
        assert not engine.asked
        assert await client.message([ASKED])  # the episode goes on


async def test_fields_that_change_nothing_or_have_the_episodes_value_are_taken(tokens):
    fields = {"temperature": 0.7, "n": 1, "user": "me", "seed": None, "max_completion_tokens": 2}
    engine = Engine(tokens, "345")
    async with served(session_of(engine)) as (_, client):
        parts = [{"type": "text", "text": "1+"}, {"type": "text", "text": "2="}]
        status, made = await client.post([ASKED | {"content": parts}], **fields)
    [choice] = made["choices"]
    assert (status, choice["message"]["content"]) == (200, "34")
    assert choice["finish_reason"] == "length"
    assert "1+2=" in tokens.decode(engine.asked[0][0])


async def test_a_text_that_ends_a_reply_is_not_given_out_and_stays_in_the_conversation(tokens):
    engine, record = Engine(tokens, "a</s>", "b"), EpisodeRecord()
    async with served(session_of(engine, record)) as (_, client):
        first = await client.message([ASKED], stop="</s>")
        assert first["content"] == "a"
        await client.message([ASKED, first, ASKED], stop=["</s>", "x"])
    assert engine.asked[0][2].end is not None
    assert "a</s>" in tokens.decode(engine.asked[1][0]) and len(sequences(record)) == 1


async def test_trouble_of_engines_is_a_503_and_the_sessions_failure(tokens):
    session = session_of(Engine(tokens, error=EngineLostError("http://x: gone")))
    async with served(session) as (_, client):
        status, made = await client.post([ASKED])
    assert (status, made["error"]["message"]) == (503, "http://x: gone")
    assert isinstance(session.failure, EngineLostError)


async def test_requests_of_an_episode_are_answered_one_after_another(tokens):
    engine = Engine(tokens, "1", "2", "3")
    async with served(session_of(engine)) as (_, client):
        made = await asyncio.gather(*[client.message([ASKED]) for _ in range(3)])
    assert engine.most == 1 and {each["content"] for each in made} == {"1", "2", "3"}


async def test_who_asks_again_after_a_timeout_gets_the_reply_that_was_under_way(tokens):
    engine = Engine(tokens, "3", "4")
    engine.may_answer.clear()
    async with served(session_of(engine)) as (place, client):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.post([ASKED]), 0.2)
        await asyncio.sleep(0.1)
        assert place.is_asked
        asyncio.get_running_loop().call_later(0.1, engine.may_answer.set)
        assert (await client.message([ASKED]))["content"] == "3"
        assert len(engine.asked) == 1
        assert (await client.message([ASKED]))["content"] == "4", "asked anew, it is another"


async def test_without_the_key_of_an_episode_there_is_nothing(tokens):
    engine = Engine(tokens, "3")
    async with aiohttp.ClientSession() as http:
        async with served(session_of(engine)) as (place, client):
            assert place.base_url.startswith("http://127.0.0.1:")
            for headers in ({}, {"Authorization": "Bearer x"}, {"Authorization": "Bearer "}):
                for method, path in (("POST", "/chat/completions"), ("GET", "/models")):
                    url = place.base_url + path
                    async with http.request(method, url, headers=headers, data=b"{") as said:
                        assert said.status == 401 and "key" in await said.text()
            async with http.get(f"{place.base_url}/models", headers=client.headers) as said:
                assert [each["id"] for each in (await said.json())["data"]] == ["policy"]
            async with served(session_of(Engine(tokens, "4"))) as (other, its_client):
                assert other.base_url == place.base_url and other.api_key != place.api_key
                assert (await its_client.message([ASKED]))["content"] == "4"
            async with http.get(f"{place.base_url}/models", headers=its_client.headers) as said:
                assert said.status == 401, "its episode is over"
            assert not engine.asked
        with pytest.raises(aiohttp.ClientConnectionError):
            await http.get(f"{place.base_url}/models", headers=client.headers)


async def test_what_is_under_way_ends_with_the_episode(tokens):
    engine = Engine(tokens, "3")
    engine.may_answer.clear()
    async with served(session_of(engine)) as (_, client):
        asking = asyncio.create_task(client.post([ASKED]))
        while not engine.running:
            await asyncio.sleep(0.01)
    assert engine.running == 0
    with pytest.raises(aiohttp.ClientError):
        await asking
