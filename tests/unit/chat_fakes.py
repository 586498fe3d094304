"""A policy behind the chat API without engines: it says what it is told to, in any tokens."""

import asyncio
from contextlib import asynccontextmanager

import aiohttp
from episode_fakes import answer

from relax_hpc.cli.demo import models
from relax_hpc.data.conversation import Conversation
from relax_hpc.data.source import Prompt
from relax_hpc.environments.chat_api.server import serving
from relax_hpc.environments.record import EpisodeRecord
from relax_hpc.environments.session import Session
from relax_hpc.inference.generation import Sampling
from relax_hpc.schema import FinishReason

TEMPLATE = """
{%- if tools %}{{ '<|im_start|>system\n# Tools' }}{% for tool in tools %}{{ '\n' + tool | tojson }}
{%- endfor %}{{ '<|im_end|>\n' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}{{ '<|im_start|>assistant\n' + message.content }}
{%- for call in message.tool_calls %}{{ '<tool_call>' + call.function | tojson + '</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>' + message.content + '</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
{%- else %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
"""As Qwen's: tools, calls and what they gave."""

ASKED = {"role": "user", "content": "1+2="}


def tokens_of(template=TEMPLATE):
    tokens = models.tokenizer(words=[*models.WORDS, "sum"])
    tokens.chat_template = template
    return tokens


def spelled(tokens, text):
    """Tokens of a text, a token each byte, and the end of a turn: encoding gives words one."""
    [end] = tokens.encode("<|im_end|>", add_special_tokens=False)
    return [id for c in text for id in tokens.encode(c, add_special_tokens=False)] + [end]


class Engine:
    """Says one reply after the other; before, waits where it is told to. A reply that is "..." has
    a token of the next, and no end."""

    def __init__(self, tokens, *replies, error=None):
        self.tokens, self.replies, self.asked = tokens, list(replies), []
        self.error, self.may_answer, self.most = error, asyncio.Event(), 0
        self.may_answer.set()
        self.running = 0

    async def sample(self, given, draft, how, *, seed, homes):
        self.asked.append((list(given), list(draft.token_ids), how))
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(0)
            await self.may_answer.wait()
            if self.error:
                raise self.error
            said = self.replies.pop(0)
            if said == "...":
                answer(draft, spelled(self.tokens, self.replies.pop(0))[:1], [-1.0], [(0, 4)])
                await asyncio.sleep(600)
            ids = spelled(self.tokens, said)[len(draft.token_ids) :]
            ids, whole = ids[: how.max_new_tokens], len(ids) <= how.max_new_tokens
            finish = FinishReason.STOP if whole else FinishReason.LENGTH
            return answer(draft, ids, [-1.0] * len(ids), [(0, 4)], finish)
        finally:
            self.running -= 1


def session_of(engine, record=None, *, max_tokens=4000, tools=None, temperature=0.7):
    conversation = Conversation(engine.tokens, chat_template=True)
    ids = conversation.encode("a test", [ASKED], tools)
    prompt = Prompt(3, ids, "12", [ASKED], tools=tools, where="p.jsonl:4")
    how = Sampling(temperature, 200, max_tokens=max_tokens)
    record = EpisodeRecord() if record is None else record
    return Session(prompt, record, engine, conversation, how, group=9, episode=(9, 1), seed=11)


@asynccontextmanager
async def served(session):
    """The endpoint of a session, and who asks it."""
    async with serving(session) as place, aiohttp.ClientSession() as http:
        yield place, Client(http, place.base_url, place.api_key)


class Client:
    def __init__(self, http, base_url, key):
        self.http, self.base_url, self.headers = http, base_url, {"Authorization": f"Bearer {key}"}

    async def post(self, messages, **fields):
        """The status, and the JSON of the answer."""
        body = {"model": "any", "messages": messages} | fields
        async with self.http.post(
            f"{self.base_url}/chat/completions", json=body, headers=self.headers
        ) as answer:
            return answer.status, await answer.json()

    async def message(self, messages, **fields):
        status, made = await self.post(messages, **fields)
        assert status == 200, made
        return made["choices"][0]["message"]
