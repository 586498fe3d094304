"""A streamed reply of SGLang, put into a draft piece by piece."""

import base64
from collections.abc import AsyncIterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any

import numpy as np

from relax_hpc.engines.http import cut, parse_version
from relax_hpc.engines.response import Counts, Draft
from relax_hpc.errors import (
    EngineError,
    EngineFaultError,
    EngineLostError,
    MediaMissingError,
)
from relax_hpc.media import wire
from relax_hpc.media.spool import View
from relax_hpc.schema import FinishReason

_FINISH = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
}


class Reply:
    """Puts the chunks of one streamed reply into a draft."""

    def __init__(self, asked: str, draft: Draft, num_given: int, version: int = 0) -> None:
        """`version` is that of the engine when it was asked."""
        self._asked, self._draft, self._num_given = asked, draft, num_given
        self._first = len(draft.token_ids)
        draft.version_runs = [run for run in draft.version_runs if run[0] < self._first]
        self.version, self._settled = version, True
        """Version of the newest token; whether it is known exactly which token is whose."""
        self._last: dict[str, Any] | None = None

    def add(self, chunk: dict[str, Any]) -> None:
        if error := chunk.get("error"):
            said = str(error.get("message", error))
            kind = MediaMissingError if wire.MISSING in said else EngineError
            raise kind(f"{self._asked}: {cut(said)}")
        meta = chunk["meta_info"]
        self._check_accepted(meta.get("finish_reason"))
        draft = self._draft
        held = len(draft.token_ids) - self._first
        new = int(meta["completion_tokens"]) - held
        if new > 0:  # a chunk has what is new, or (as a server's option) everything so far
            pairs = meta["output_token_logprobs"][-new:]
            if len(pairs) != new:
                raise EngineError(f"{self._asked}: {new} new tokens, {len(pairs)} logprobs")
            draft.mark(self._first + held, self.version)
            draft.take([int(pair[1]) for pair in pairs], [float(pair[0]) for pair in pairs])
            self.version = parse_version(meta)
        self._last = meta

    def settle(self, rid: str, switches: Mapping[int, Mapping[str, int]] | None) -> None:
        """Puts the changes of policy that the last chunk spans where they were."""
        if switches is None:
            self._settled = False
        for version, num_sampled in (switches or {}).items():
            self._draft.remark(self._first + num_sampled.get(rid, 0), version)

    def given(self, view: View | None) -> Counts:
        """Counts the prompt, of which the engine says how much it had in its cache."""
        assert self._last is not None
        cached = int(self._last.get("cached_tokens", 0))
        ends = {span.medium: span.first + span.tokens for span in (view.spans if view else ())}
        found = sum(end <= cached for end in ends.values())
        return Counts(0, self._num_given, cached, len(ends), found)

    @property
    def is_complete(self) -> bool:
        """Whether its last chunk has come."""
        return self._last is not None and bool(self._last.get("finish_reason"))

    def finish(self) -> FinishReason:
        """Call it at the end of the stream."""
        if self._last is None or not self.is_complete:
            raise EngineLostError(f"{self._asked}: the reply broke off")
        if not self._settled and (spans := self._last.get("weight_versions")) is not None:
            self._mark_again(spans)
        if encoded := self._last.get("routed_experts"):
            self._take_experts(encoded)
        return _FINISH[self._last["finish_reason"]["type"]]

    def _check_accepted(self, finish: dict[str, Any] | None) -> None:
        if finish and finish["type"] == "abort" and (status := finish.get("status_code")):
            kind = EngineError if status == HTTPStatus.BAD_REQUEST else EngineFaultError
            raise kind(f"{self._asked}: refused: {status}: {cut(finish.get('message'))}")

    def _mark_again(self, spans: Sequence[dict[str, Any]]) -> None:
        """The engine says precisely which token has which version."""
        draft = self._draft
        draft.version_runs = [run for run in draft.version_runs if run[0] < self._first]
        for span in spans:
            if span["end"] > span["start"]:
                version = parse_version({"weight_version": span["version"]})
                draft.mark(self._first + int(span["start"]), version)

    def _take_experts(self, encoded: str) -> None:
        """Rows of the tokens that went through the model since the last row of the draft."""
        draft = self._draft
        num_sampled = len(draft.token_ids) - self._first
        rows = self._num_given + num_sampled - 1 - sum(map(len, draft.experts))
        flat = np.frombuffer(base64.b64decode(encoded), dtype=np.int32)
        if rows <= 0 or flat.size % rows:
            raise EngineError(f"{self._asked}: {flat.size} routed experts for {rows} tokens")
        draft.experts.append(flat.reshape(rows, -1).astype(np.int16))


async def events(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The JSON texts of server-sent events, up to the mark that ends them."""
    begun = list[bytes]()  # of a line, which may be megabytes of routed experts
    async for piece in pieces:
        first, *more = piece.split(b"\n")
        begun.append(first)
        if not more:
            continue
        lines, begun = [b"".join(begun), *more[:-1]], [more[-1]]
        for line in lines:
            if line.startswith(b"data: ") and line != b"data: [DONE]":
                yield line[6:]
