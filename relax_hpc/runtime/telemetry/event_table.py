"""Declares the events of a run: their writers, meaning, fields and curves.

`docs/reference/events.md` is generated from this table, and `EventWriter` accepts nothing else.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple


class EventKind(NamedTuple):
    """One kind of line in `events/*.jsonl`."""

    by: str
    """Components that write it; "all" is every task."""
    meaning: str
    fields: Mapping[str, str] = MappingProxyType({})
    """Field -> meaning, "" if the name says it; "area/..." stands for all fields with that prefix.
    """
    tags: Mapping[str, str] = MappingProxyType({})
    """Field -> tag of its curve in TensorBoard and other boards; <name> stands for the value of
    that field. A number without a tag is not drawn."""


_PHASES = "`[name, start, seconds]` each, start in seconds since 1970"
_SYNC = "seconds of the parts of an update, see docs/explanation/architecture.md"
_SAME_SYNC = {"sync/...": "sync/..."}
PREFIXES = ("eval", "loss", "reward", "rollout", "staleness", "sync", "time", "trainer")
"""First parts of all tags, in the order of the boards."""

EVENTS: dict[str, EventKind] = {
    # every task
    "start": EventKind(
        "all",
        "a task begins",
        {
            **{"attempt": "job id and restart count", "start": "of the step, from 1", "node": ""},
            "step_from": "the lowest rank that is started with it",
        },
    ),
    "world": EventKind(
        "all",
        "the ranks of a component have found each other",
        {"kind": "MpiWorld, StarWorld or SoloWorld", "size": ""},
    ),
    "events_dropped": EventKind(
        "all", "storage did not take events of this file", {"number": "events that are missing"}
    ),
    "error": EventKind("all", "the task fails", {"message": ""}),
    "hang": EventKind(
        "all",
        "the watchdog of a task finds that it hangs, or waits for ranks that do",
        {
            "phase": "what it did",
            "step": "0 outside steps",
            "seconds": "without a sign of life",
            "limit_s": "seconds that it may be without one",
            "state": "letter of the kernel: T stopped, S asleep, D waits for a device, R runs",
            "channel": "function of the kernel that it slept in",
            "place": "file, line and function",
            "log": "file with the stacks",
            "ended": "whether the watchdog ended it",
            "message": "",
        },
    ),
    "end": EventKind(
        "all", "the task is done", {"duplicates": "trajectories committed twice and ignored; actor"}
    ),
    # rollout and engines
    "engine": EventKind(
        "rollout, engines",
        "an engine is healthy",
        {
            "id": "",
            "start": "as in its member record",
            "url": "",
            "engine_pid": "",
            "kind": "",
            "version": "of its package",
            "start_s": "",
        },
    ),
    "engine_end": EventKind(
        "rollout, engines",
        "an engine ended, hangs or was fenced, and is started again",
        {"id": "", "start": "", "reason": ""},
    ),
    "drain": EventKind(
        "engines",
        "an added engine has finished what it had",
        {"seconds": "", "aborted": "requests that it did not finish"},
    ),
    "load": EventKind(
        "rollout",
        "what an engine did for this task since the last such event",
        {
            "id": "",
            "seconds": "",
            "num_tokens": "sampled",
            "num_given": "tokens of prompts and of responses that went on",
            "num_cached": "those of them that it did not compute",
            "num_media": "media among them",
            "num_media_cached": "media that it did not encode, for it computed nothing of them",
            "in_flight": "requests now",
            "version": "of its weights now",
            "kv_used": "part of its cache, whoever uses it; null if it does not say",
        },
        {
            "num_tokens": "rollout/engines/<id>/tokens_per_s",
            "num_cached": "rollout/engines/<id>/cached",
            "num_media_cached": "rollout/engines/<id>/media_cached",
            "in_flight": "rollout/engines/<id>/in_flight",
            "kv_used": "rollout/engines/<id>/kv_used",
        },
    ),
    "rests": EventKind(
        "rollout",
        "an engine is slow: this task asks nothing new of it for a while",
        {"id": "", "rate": "tokens/s of a request", "median": "of all engines", "seconds": ""},
    ),
    "shard": EventKind(
        "rollout",
        "prompt groups are committed to the bus",
        {
            "seconds": "that the commit took",
            "first_guid": "",
            "num_groups": "",
            "num_episodes": "of which the means are",
            "num_trajectories": "",
            "num_tokens": "",
            "policy_version_min": "",
            "policy_version_max": "",
            "reward/...": "mean over episodes that count, if any does",
            "parts/...": "mean of each part of the reward over the episodes that have it",
            "rollout/...": "likewise of the environment's metrics; time/episode, seconds from its "
            "begin to its end, and time/reward, that the job's reward took; media/number, bytes, "
            "tokens, prepare_s, seconds until media were there; reward/<source>, of each source",
            "counts": "episodes that have it, by name of a mean, where these are not all",
        },
        {"rollout/...": "rollout/..."},
    ),
    "waits": EventKind(
        "rollout",
        "the trainer has finished a step; what this task did meanwhile",
        {
            "step": "",
            "time/...": "seconds: sampling, while any group is under way; else by reason, see "
            "docs/how-to/what-now.md",
            "groups/early": "prompt groups begun for the places of groups that will probably be "
            "skipped; some were not needed",
            "groups/surplus": "of these, sampled again by a newer policy",
        },
    ),
    "unfinished": EventKind(
        "rollout",
        "the job is about to end: responses that are not finished are kept on the bus",
        {
            "num_groups": "",
            "num_tokens": "sampled",
            "num_lost": "sampled, at most, and neither committed nor kept, e.g. the last of each",
        },
    ),
    "continued": EventKind(
        "rollout",
        "a task goes on with what was kept",
        {
            "num_groups": "",
            "num_tokens": "sampled, which need not be sampled again",
            "num_dropped": "tokens that are, by rollout.advanced.max_continuations",
            "num_damaged": "tokens, prompts included, in damaged shards of what was kept",
        },
    ),
    "reward_errors": EventKind(
        "rollout",
        "rewards failed: they are 0, or masked",
        {
            "heldout": "whether they are of held-out prompts, which nothing is trained on",
            "num_samples": "scored since the last such event",
            "num_errors": "those of them that failed",
            "first": "why the first did",
        },
    ),
    "eval": EventKind(
        "rollout",
        "this task's share of an evaluation, to be added up over tasks",
        {
            "name": "of the set in `eval`",
            "headline": "whether it is the job's first set, which curve and summary show",
            "when": "before, during or after",
            "number": "among those of `when`",
            "tasks": "that have a share of it; until all have told theirs there is no score",
            "version": "oldest policy that sampled a token; -1 if none was sampled",
            "version_max": "newest policy that did",
            "correct": "sum of the scores",
            "num_samples": "with a score",
            "num_masked": "without: their reward failed, with reward.on_error = mask",
            "num_tokens": "sampled",
            "num_truncated": "samples cut off by a limit",
            "seconds": "that it took, in this start of the task",
        },
        {"correct": "eval/<name>/reward", "num_truncated": "eval/<name>/truncated"},
    ),
    # scorers and the critic
    "scored": EventKind(
        "reference, teacher, critic",
        "shards have got the logprobs of the reference or a teacher, or the critic's values",
        {
            "num_shards": "",
            "num_trajectories": "",
            "num_tokens": "",
            "first_guid": "",
            "time/...": "seconds: wait, score, write",
        },
    ),
    "critic_resume": EventKind("critic", "it goes on from a checkpoint", {"step": ""}),
    "critic_step": EventKind(
        "critic",
        "it has learned from the batch of a step; a resume repeats some, with the same numbers",
        {
            "step": "",
            "loss": "per trained token",
            "value/...": "over trained tokens: mean before the update, mean return, share clipped; "
            "explained, the share of the returns' variance that the values explain",
            "grad_norm": "before clipping",
            "lr": "",
            "skipped": "part of the updates that were not done",
            "loss_scale": "float16",
            "moe/...": "experts: max_load and the losses that are on",
            "train/...": "tokens_per_s_per_gpu, mfu, padding",
            "memory/...": "peak_gib of the fullest rank",
            "time/...": "seconds of rank 0, as of `step`",
        },
        {
            "loss": "loss/critic",
            "value/...": "loss/critic/...",
            "grad_norm": "trainer/critic/grad_norm",
            "lr": "trainer/critic/lr",
            "skipped": "trainer/critic/skipped",
            "train/...": "trainer/critic/...",
            "time/...": "time/critic/...",
        },
    ),
    # actor
    "parameters": EventKind(
        "actor",
        "the trainer has its model",
        {"trained": "elements that learn", "fixed": "elements that stay: frozen, or adapted"},
    ),
    "resume": EventKind("actor", "training goes on from a checkpoint", {"step": ""}),
    "step": EventKind(
        "actor",
        "a step is trained; one that is trained again after a resume has two, the newer counts",
        {
            "step": "",
            "eta_s": "seconds to the end of the last step, if each takes the mean of the newest 20 "
            "of this start, its first left out; null in that one",
            "policy_version": "of the policy that the step made",
            "num_trajectories": "rows: an episode of several sequences has several",
            "num_documents": "SFT",
            "num_tokens": "of the batch, prompts included",
            "num_trained_tokens": "SFT",
            "tokens_per_s": "num_tokens, what is trained, by time/step",
            "loss": "by the mean of algorithm.aggregation; of several updates the mean, as all "
            "that they tell",
            "loss/...": "of the algorithm, per trained token: ratio, ratio_squared, "
            "log_ratio_squared and approx_kl to the anchor, masked_fraction, clip_fraction, "
            "importance_mean, importance_capped, importance_rejected, m2po_tau",
            "entropy": "nats",
            "grad_norm": "before clipping",
            "lr": "",
            "skipped": "part of the updates that were not done",
            "loss_scale": "float16",
            "reward/...": "mean over the batch's episodes, none where all of them failed and are "
            "masked; errors: part of the episodes whose reward failed; sampled: with those that "
            "were skipped",
            "parts/...": "mean of each part of the reward over the batch's episodes that have it; "
            "where all have all of them, those without a slash add up to reward/mean",
            "staleness/...": "mean, max over episodes, of the oldest token; over_age: by "
            "schedule.over_age, part of the groups that were dropped for this batch, or of its "
            "episodes with tokens left out",
            "response/...": "mean tokens of an episode behind its prompts; truncated: part of the "
            "episodes",
            "groups/...": "parts of the prompt groups: solved, teaching; with refill how many were "
            "skipped for this batch, how many of those are solved, and how many were not sampled, "
            "since their prompt is retired: skipped, skipped_solved, skipped_retired; no_spread: "
            "part of those sampled, skipped ones included, if the algorithm compares siblings",
            "batch/...": "portions, micro_batches per rank, imbalance of tokens over ranks",
            "data/...": "SFT: epoch, truncated, left_out",
            "kl/...": "to the reference: mean",
            "distill/...": "to the teachers, nats per token: kl",
            "logprob_gap/...": "this policy and the sampler, before the update: mean, max; nats",
            "engine_gap/...": "likewise, of tokens that this very policy sampled; where "
            "weights.advanced.kv_cache keeps keys and values of the one before, these count in it",
            "moe/...": "experts: max_load and the losses that are on",
            "routing/...": "routing replay: differs, missing, parts of the choices of experts; "
            "mixed, part of the rows; every tenth step gap, gap_without, nats",
            "train/...": "tokens_per_s_per_gpu and mfu by the seconds that all ranks computed, "
            "epochs counted; padding; tower_tflops; media/... encoded",
            "memory/...": "peak_gib of the fullest rank",
            "time/...": "seconds of rank 0, waits for other ranks included: step is all of it, the "
            "others are its parts; towers encode media, other has no name",
        },
        {
            "eta_s": "time/eta_s",
            "num_trajectories": "trainer/num_trajectories",
            "num_documents": "trainer/num_documents",
            "num_tokens": "trainer/num_tokens",
            "num_trained_tokens": "trainer/num_trained_tokens",
            "tokens_per_s": "trainer/tokens_per_s",
            "loss": "loss/total",
            "loss/...": "loss/...",
            "entropy": "loss/entropy",
            "kl/...": "loss/kl/...",
            "distill/...": "loss/distill/...",
            "grad_norm": "trainer/grad_norm",
            "lr": "trainer/lr",
            "skipped": "trainer/skipped",
            "loss_scale": "trainer/loss_scale",
            "reward/...": "reward/...",
            "parts/...": "reward/parts/...",
            "groups/...": "reward/groups/...",
            "staleness/...": "staleness/...",
            "logprob_gap/...": "staleness/logprob_gap/...",
            "engine_gap/...": "staleness/engine_gap/...",
            "response/...": "rollout/response/...",
            "batch/...": "trainer/batch/...",
            "data/...": "trainer/data/...",
            "moe/...": "trainer/moe/...",
            "routing/...": "staleness/routing/...",
            "train/...": "trainer/...",
            "memory/...": "trainer/memory/...",
            "time/...": "time/...",
        },
    ),
    "phases": EventKind(
        "actor, reference, critic, rollout",
        "when the parts of the last step, or of the start of the task, were",
        {"step": "0: the start", "phases": _PHASES},
    ),
    "publish": EventKind(
        "actor",
        "engines were given a version",
        {
            "step": "",
            "version": "",
            "transport": "null if nobody had to be given anything",
            "members": "who has it",
            "fenced": "who failed",
            "again": "whether others are still to get it",
            "invited": "where a group was formed: how each engine was asked into it",
            "loading": "who has begun to load it from files",
            "num_bytes": "",
            "pause_seconds": "",
            "error": "why a snapshot was not written",
            "phases": _PHASES,
            "sync/...": _SYNC,
        },
        _SAME_SYNC,
    ),
    "loaded": EventKind(
        "actor, rollout",
        "an engine has ended to load a version from files; told by who had it do so",
        {
            "step": "",
            "version": "",
            "members": "",
            "fenced": "",
            "num_bytes": "",
            "error": "why it is fenced",
            "phases": _PHASES,
            "sync/...": _SYNC,
        },
        _SAME_SYNC,
    ),
    "verify": EventKind(
        "actor, rollout",
        "weights of engines and trainer were compared; likewise",
        {"version": "", "trainer": "digest", "members": "digests", "equal": ""},
    ),
    "engine_gap": EventKind(
        "actor",
        "once per start: how far the engines' logprobs are from the trainer's",
        {
            "step": "",
            "policy_version": "",
            "num_tokens": "",
            "mean": "nats",
            "max": "nats",
            "k3": "",
            "limit": "of the mean",
        },
    ),
    "checkpoint": EventKind(
        "actor, critic",
        "a checkpoint is complete",
        {
            "step": "",
            "wait_s": "that training waited",
            "background_s": "until it was complete",
            "bytes": "",
        },
        {"wait_s": "time/checkpoint/wait", "background_s": "time/checkpoint/background"},
    ),
    "checkpoint_failed": EventKind(
        "actor, critic", "it could not be saved; the run goes on", {"step": "", "message": ""}
    ),
    "checkpoint_torn": EventKind(
        "actor, critic", "it is not whole, and was passed over", {"step": "", "message": ""}
    ),
    "export": EventKind(
        "actor", "the model is a Hugging Face folder", {"step": "", "path": "", "seconds": ""}
    ),
    "skipped": EventKind(
        "actor, critic",
        "an update was not done",
        {
            "step": "",
            "reason": "",
            "in_a_row": "",
            "num_samples": "with something that is not finite",
            "samples": "up to 8: guid, sibling, dp_rank, micro_batch, what, shard",
        },
    ),
    "heldout": EventKind(
        "actor",
        "SFT: loss of the held-out documents",
        {"step": "", "loss": "", "num_tokens": ""},
        {"loss": "eval/heldout/loss"},
    ),
    "reference": EventKind("actor", "the policy of that step became the reference", {"step": ""}),
    "lease": EventKind(
        "actor",
        "engines on the actor's GPUs: who has them now",
        {"holder": "trainer or engines", "seconds": "until they were its own", "free_gib": ""},
    ),
}


def find_undeclared(event: str, fields: Iterable[str]) -> list[str]:
    """Returns the names among `fields` that `EVENTS` does not have for `event`."""
    declared = EVENTS[event].fields
    return [name for name in fields if name not in declared and _area(name) not in declared]


def tag(event: str, field: str, **names: str) -> str | None:
    """Returns the tag of a field's curve; None if the field is not drawn.

    Args:
        names: values for placeholders in the tag.
    """
    tags = EVENTS[event].tags
    found = tags.get(field)
    if found is None and (area := _area(field)) in tags:
        found = tags[area].removesuffix("...") + field.partition("/")[2]
    if found is None:
        return None
    for name, value in names.items():
        found = found.replace(f"<{name}>", value)
    return found


def _area(name: str) -> str:
    area, slash, _ = name.partition("/")
    return f"{area}/..." if slash else ""
