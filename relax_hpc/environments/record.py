"""Records an episode's calls, and turns them into training sequences.

The record belongs to the runner of the episode: it survives a cancelled or failed episode, and
another session can continue it.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from relax_hpc.data.media.expand import MediaSpan
from relax_hpc.inference.generation import Draft
from relax_hpc.schema import NO_SPANS, FinishReason, Medium, Trajectory, TurnKind

_GIVEN, _SAMPLED, _TOOL = map(int, TurnKind)  # NumPy takes its time over enumerations


@dataclass(slots=True)
class Call:
    """One request to the policy, and its samples so far."""

    given: Items[int]
    """Token ids before the response."""
    media: tuple[Medium, ...] = ()
    """Media in `given`, in order."""
    spans: tuple[MediaSpan, ...] = ()
    """Tokens of `given` that stand for their features."""
    draft: Draft = field(default_factory=Draft)
    """Sampled ids, logprobs and versions; grows while the response arrives."""
    finish: FinishReason | None = None
    """None while pending or interrupted. Calls read back have the finish of their row."""
    is_cut: bool = False
    """Whether the run's own limit (`rollout.max_new_tokens` or the context) ended it, rather than
    the environment's; also if no space was left to continue."""
    is_over: bool = False
    """Whether a call that was read back has ended, for an unknown reason."""
    routed_experts: npt.NDArray[np.int16] | None = None
    """[given and sampled tokens, layers x experts per token], if requested."""

    @property
    def token_ids(self) -> list[int]:
        return [*self.given, *self.draft.token_ids]


@dataclass(slots=True)
class EpisodeRecord:
    """The calls of an episode, in order of their start."""

    calls: list[Call] = field(default_factory=list)


class Sequence(NamedTuple):
    """A training row of T tokens."""

    token_ids: npt.NDArray[np.int32]
    prompt_len: int
    """Tokens before the first sampled one."""
    loss_mask: npt.NDArray[np.uint8]
    """[T] 1 on sampled tokens, each in one sequence only."""
    logprobs: npt.NDArray[np.float32]
    """[T] nats, at sampling time; 0 where not sampled."""
    version_runs: npt.NDArray[np.int32]
    """[R, 2] (first token of the row, policy version)"""
    turns: npt.NDArray[np.int32]
    """[turns, 2] (first token of the row, schema.TurnKind)"""
    finish: FinishReason
    """LENGTH if a limit of the run ended any of its calls."""
    media: tuple[Medium, ...]
    media_spans: npt.NDArray[np.int32]
    """[spans, 3] (medium, first token of the row, tokens)"""
    routed_experts: npt.NDArray[np.int16] | None
    """[T, layers x experts per token]"""


def sequences(record: EpisodeRecord) -> list[Sequence]:
    """Makes the training sequences of an episode.

    A call extends the sequence whose tokens begin its given ids. If there is none, because history
    was dropped, rewritten or branched, a new sequence begins, in which earlier samples count as
    given. So every sampled token is trained on once.
    """
    chains = [record.calls[:1]] if record.calls else []
    for call in record.calls[1:]:
        for chain in reversed(chains):
            before = chain[-1].token_ids
            if list(call.given[: len(before)]) == before:
                chain.append(call)
                break
        else:
            chains.append([call])
    return [_sequence(chain) for chain in chains]


def record_of(rows: Items[Trajectory]) -> EpisodeRecord:
    """Rebuilds an episode's record from its rows, so that a session can continue it.

    The calls of a row are its turns. Omits media, which a session knows, and calls without a token.
    """
    return EpisodeRecord([call for row in rows for call in _calls(row)])


def _calls(row: Trajectory) -> list[Call]:
    turns = [] if row.turns is None else row.turns.tolist()
    starts = [start for start, kind in turns if kind == _SAMPLED]
    ends = [end for end, _ in turns[1:]] + [len(row.token_ids)]
    after = {start: end for (start, _), end in zip(turns, ends, strict=True)}
    logprobs, versions = row.columns["rollout_logprobs"], row.version_runs.tolist()
    calls = []
    for start in starts:
        end = after[start]
        runs = [(first - start, version) for first, version in versions if start <= first < end]
        draft = Draft(row.token_ids[start:end].tolist(), logprobs[start:end].tolist(), runs)
        call = Call(row.token_ids[:start].tolist(), draft=draft, is_over=end < len(row.token_ids))
        calls.append(call)
    if calls and not calls[-1].is_over and row.finish is not FinishReason.ABORT:
        calls[-1].finish, calls[-1].routed_experts = row.finish, row.routed_experts
        calls[-1].is_cut, calls[-1].is_over = row.finish is FinishReason.LENGTH, True
    return calls


def break_off(record: EpisodeRecord) -> int:
    """Makes an interrupted call continuable.

    Drops its last token, which may have ended the response without a report.

    Returns:
        An upper bound of the sampled tokens that are lost: that one, and those not sent.
    """
    num_lost = 0
    for call in record.calls[-1:]:
        if call.finish is None and not call.is_over:
            num_forgotten = min(len(call.draft.token_ids), 1)
            call.draft.experts.clear()
            call.draft.cut(len(call.draft.token_ids) - num_forgotten)
            num_lost += num_forgotten + call.draft.num_unsent
    return num_lost


def _sequence(chain: Items[Call]) -> Sequence:
    last = chain[-1]
    size = len(last.given) + len(last.draft.token_ids)
    loss_mask, logprobs = np.zeros(size, np.uint8), np.zeros(size, np.float32)
    runs: list[tuple[int, int]] = []
    turns: list[tuple[int, int]] = []
    end = 0
    for call in chain:
        start, draft = len(call.given), call.draft
        if start > end:
            turns.append((end, _TOOL if turns else _GIVEN))
        end = start + len(draft.token_ids)
        if end > start:
            turns.append((start, _SAMPLED))
        loss_mask[start:end] = 1
        logprobs[start:end] = draft.logprobs
        for first, version in draft.version_runs:
            if start + first < end:
                runs.append((start + first, version))
    return Sequence(
        token_ids=np.fromiter(last.token_ids, np.int32, size),
        prompt_len=len(chain[0].given),
        loss_mask=loss_mask,
        logprobs=logprobs,
        version_runs=_pairs(runs),
        turns=_pairs(turns),
        finish=_finish(chain),
        media=last.media,
        media_spans=np.array(last.spans, np.int32) if last.spans else NO_SPANS,
        routed_experts=last.routed_experts,
    )


def _finish(chain: Items[Call]) -> FinishReason:
    """A limit of the environment is as good an end as the policy's own."""
    last = chain[-1].finish
    if last is None or last is FinishReason.ABORT:
        return FinishReason.ABORT
    is_cut = any(call.is_cut for call in chain)
    return FinishReason.LENGTH if is_cut else FinishReason.STOP


def _pairs(pairs: list[tuple[int, int]]) -> npt.NDArray[np.int32]:
    return np.array(pairs, np.int32) if pairs else np.empty((0, 2), np.int32)
