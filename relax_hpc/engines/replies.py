"""What engines answer: JSON, sometimes an error with status 200, and a policy version as text."""

from typing import Any

import httpx

from relax_hpc.errors import EngineError

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
        said = reply.get("message") if isinstance(reply, dict) else None
        raise EngineError(f"{asked}: HTTP {response.status_code}: {cut(said or response.text)}")
    return reply


def parse_version(reply: dict[str, Any]) -> int:
    """`weight_version` of a reply; SGLang says "default" where nobody has named one."""
    version = reply["weight_version"]
    return 0 if version == "default" else int(version)


def cut(text: object) -> str:
    """The beginning of what an engine said, for an error message."""
    return str(text)[:_SHOWN_CHARACTERS]
