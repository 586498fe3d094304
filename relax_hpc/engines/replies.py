"""What engines answer: JSON, sometimes an error with status 200, and a policy version as text."""

import json
from http import HTTPStatus
from typing import Any

import httpx

from relax_hpc.errors import EngineError, EngineLostError

_SHOWN_CHARACTERS = 500


def checked(asked: str, response: httpx.Response) -> Any:  # noqa: ANN401
    """The reply's JSON (None if it is not JSON); status 200 alone is not success.

    Args:
        asked: URL, as errors shall name it.
        response: whole.

    Raises:
        EngineError: refused.
    """
    try:
        reply = response.json()
    except ValueError:
        reply = None
    refused = isinstance(reply, dict) and reply.get("success") is False
    if not response.is_success or refused:
        raise refusal(asked, response.status_code, response.content)
    return reply


def refusal(asked: str, status: int, content: bytes) -> EngineError:
    """The error that a reply means; one of the server's own making is an EngineLostError."""
    try:
        reply = json.loads(content)
    except ValueError:
        reply = None
    said = reply.get("message") if isinstance(reply, dict) else None
    kind = EngineLostError if status >= HTTPStatus.INTERNAL_SERVER_ERROR else EngineError
    return kind(f"{asked}: HTTP {status}: {cut(said or content.decode(errors='replace'))}")


def parse_version(reply: dict[str, Any]) -> int:
    """`weight_version` of a reply; SGLang says "default" where nobody has named one."""
    version = reply["weight_version"]
    return 0 if version == "default" else int(version)


def cut(text: object) -> str:
    """The beginning of what an engine said, for an error message."""
    return str(text)[:_SHOWN_CHARACTERS]
