"""Says how much of what is sampled is not learned from, and which key decides.

Steps tell shares of the batch's responses, of the groups that were sampled for it, or of its
tokens. Words are on the mean of the newest steps, since a single batch has few groups.
"""

import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from relax_hpc.algorithms.advantages.none import NoAdvantage
from relax_hpc.algorithms.losses.cispo import Cispo
from relax_hpc.bus.plan import SkippedGroup
from relax_hpc.config.run import RunConfig
from relax_hpc.runtime.text import argument

LIMIT, RISE = 0.1, 0.05
"""A share is told above the limit, and below it once it has doubled and risen by so much."""
WINDOW, NEWEST = 20, 5
"""Steps within which it has risen; first and last of them whose means are compared."""
FIRST, BATCHES = 2, 2
"""Steps for which skipped groups are told before the batch is full, and from how many on."""
_ROUNDING = 1e-6

UNLEARNED = "not learned from"

Shares = Mapping[str, float]
Step = Mapping[str, Any]


class Notice(NamedTuple):
    name: str
    """The share's, or "nobody" or "everybody"."""
    head: str
    words: str

    @property
    def line(self) -> str:
        return f"{self.head}: {self.words}"


def shares(step: Step, config: RunConfig) -> dict[str, float]:
    """Returns the shares that the fields of a `step` event tell.

    Returns:
        Of the batch's responses: cut_off and failed. Of the groups sampled for the batch, skipped
        ones included: no_spread, and of these all_solved, whose siblings all solve them; both only
        if the algorithm compares siblings. Of the trained tokens: clipped by the loss and rejected
        by the correction. over_age: of groups if these are dropped, else of responses.
    """
    found = {
        "cut_off": step.get("response/truncated"),
        **_without_spread(step, config),
        "failed": step.get("reward/errors"),
        "over_age": step.get("staleness/over_age"),
        "clipped": step.get("loss/masked_fraction", step.get("loss/clip_fraction")),
        "rejected": step.get("loss/importance_rejected"),
    }
    if isinstance(config.algorithm.loss, Cispo):  # what it clips still teaches
        del found["clipped"]
    return {name: float(part) for name, part in found.items() if part is not None}


def _without_spread(step: Step, config: RunConfig) -> dict[str, float]:
    algorithm = config.algorithm
    parts = (algorithm.advantage, algorithm.distill)
    if any(part.needs().every_row for part in parts) or algorithm.advantage.is_of_tokens:
        return {}
    if "groups/teaching" not in step:
        return {}
    trained, retired = config.schedule.prompts_per_step, step.get("groups/skipped_retired", 0)
    skipped = step.get("groups/skipped", 0) - retired
    alike = 1 - step["groups/teaching"]
    solved = min(step.get("groups/solved", 0.0), alike) * trained
    solved += step.get("groups/skipped_solved", 0) - retired
    sampled = trained + skipped
    return {"no_spread": (alike * trained + skipped) / sampled, "all_solved": solved / sampled}


def fields_of(step: Step, config: RunConfig) -> dict[str, float]:
    """Returns what the other fields of a `step` event tell, as a field for curves."""
    found = shares(step, config)
    return {"groups/no_spread": found["no_spread"]} if "no_spread" in found else {}


def summarize(steps: Sequence[Step], config: RunConfig) -> dict[str, Any]:
    """Returns the shares of the newest steps, and what is to be said of them."""
    said = [found.line for found in find(steps, config)]
    return {"shares": mean_shares(steps[-NEWEST:], config), "said": said}


def mean_shares(steps: Sequence[Step], config: RunConfig) -> dict[str, float]:
    """Returns the mean of each share over the steps that tell it."""
    every = [shares(step, config) for step in steps]
    names = dict.fromkeys(name for found in every for name in found)
    return {
        name: statistics.fmean(found[name] for found in every if name in found) for name in names
    }


def find(steps: Sequence[Step], config: RunConfig) -> list[Notice]:
    """Finds the shares that users should know of, in words.

    Args:
        steps: `step` events, in order; the newest `WINDOW` count.
    """
    newest = steps[-NEWEST:]
    now = mean_shares(newest, config)
    first = steps[-WINDOW:][:NEWEST] if len(steps) >= 2 * NEWEST else []
    before = mean_shares(first, config)
    found = _all_alike(newest, config)
    said = {"no_spread"} if found else set()
    for name, describe in _WORDS.items():
        if name in said or not _is_told(name, now, before):
            continue
        rise = f" (rising from {_percent(before[name])})" if _rises(name, now, before) else ""
        found.append(Notice(name, *describe(_percent(now[name]), rise, now, config)))
    return found


def _is_told(name: str, now: Shares, before: Shares) -> bool:
    return now.get(name, 0.0) > LIMIT or _rises(name, now, before)


def _rises(name: str, now: Shares, before: Shares) -> bool:
    if name not in now or name not in before:
        return False
    return now[name] + _ROUNDING >= max(2 * before[name], before[name] + RISE)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _all_alike(steps: Sequence[Step], config: RunConfig) -> list[Notice]:
    """Finds a task that nobody solves, or everybody: all responses have the same reward."""
    told = {(step.get("groups/teaching"), step.get("groups/solved")) for step in steps}
    rewards = [step["reward/mean"] for step in steps if step.get("reward/mean") is not None]
    cases = (({(0, 0)}, "nobody"), ({(0, 1)}, "everybody"))
    who = next((name for case, name in cases if told == case), None)
    if who is None or not rewards or not max(rewards) - min(rewards) < _ROUNDING:
        return []
    if config.rollout.samples_per_prompt * len(steps) == 1:  # a group of one has no spread
        return []
    if isinstance(config.algorithm.advantage, NoAdvantage):
        return []
    newest = f"{len(steps)} steps" if len(steps) > 1 else "step"
    rewarded = f"each response of the newest {newest} has the reward {rewards[-1]:.3g}"
    words = f"all responses, since {who} solves the task: {rewarded}; {_explain(who, config)}"
    return [Notice(who, UNLEARNED, words)]


def _explain(who: str, config: RunConfig) -> str:
    """Says which keys decide that nobody or everybody solves prompts, and where to look."""
    prompts = "prompts.sources" if config.prompts.sources else "prompts.train"
    reward = f'reward.name = "{config.reward.only_name}"'
    reward = "reward.terms" if config.reward.terms else reward
    causes = {
        "nobody": f"{reward} does not know what is right, or {prompts} is too hard",
        "everybody": f"{reward} accepts what is wrong, or {prompts} is too easy",
    }
    return f"{causes[who]}; read some: relax-hpc peek {argument(config.run_dir)}"


Words = tuple[str, str]
"""Head and words of a notice."""


def _cut_off(part: str, rise: str, now: Shares, config: RunConfig) -> Words:
    how = config.algorithm.groups.truncated
    key = f'algorithm.groups.truncated = "{how}"'
    head, done, then = {
        "mask": (
            UNLEARNED,
            "masked",
            f'{key} leaves them out; "keep" or "penalty" would teach shorter ones',
        ),
        "penalty": ("cut off", "penalised", f"{key} teaches shorter ones"),
        "keep": ("cut off", "kept", f"{key} learns from them as if they had ended there"),
    }[how]
    limit = f"rollout.max_new_tokens = {config.rollout.max_new_tokens} ends them"
    return head, f"{part} of the responses are cut off and {done}{rise}: {limit}; {then}"


def _no_spread(part: str, rise: str, now: Shares, config: RunConfig) -> Words:
    solved = now["all_solved"]
    masks = config.algorithm.groups.truncated == "mask" and now.get("cut_off", 0) > 0
    none = "none that is not cut off" if masks else "none"
    split = f"{_percent(solved)} solved by all siblings, "
    split += f"{_percent(now['no_spread'] - solved)} by {none}"
    turn = "prompts that are nearer to what it can do, or more than rollout.samples_per_prompt"
    siblings = config.rollout.samples_per_prompt
    words = f"{part} of the groups have no spread{rise}: {split}; {turn} = {siblings}, teach more"
    return UNLEARNED, words


def _failed(part: str, rise: str, now: Shares, config: RunConfig) -> Words:
    told = f"{part} of the responses have a reward that failed{rise}"
    see = 'the line "reward errors" of status says why'
    if config.reward.masks_errors:
        return UNLEARNED, f'{told}: reward.on_error = "mask" leaves them out; {see}'
    then = 'reward.on_error = "zero" teaches that they are wrong; "mask" would leave them out'
    return "rewards fail", f"{told}: {then}; {see}"


def _over_age(part: str, rise: str, now: Shares, config: RunConfig) -> Words:
    schedule = config.schedule
    what, then = ("responses have tokens that are too old", "leaves those out")
    if schedule.over_age == "drop":
        what, then = ("groups are dropped, since they are too old", "has them sampled again")
    return UNLEARNED, (
        f'{part} of the {what}{rise}: schedule.over_age = "{schedule.over_age}" {then}; raise '
        f"schedule.max_staleness = {schedule.max_staleness}, or lower engines.rollout.count"
    )


def _clipped(part: str, rise: str, now: Shares, config: RunConfig) -> Words:
    return _by_part("loss", part, rise, config)


def _rejected(part: str, rise: str, now: Shares, config: RunConfig) -> Words:
    return _by_part("correction", part, rise, config)


def _by_part(table: str, part: str, rise: str, config: RunConfig) -> Words:
    name = getattr(config.algorithm, table).name
    return UNLEARNED, (
        f'{part} of the tokens are left out by the {table}{rise}: algorithm.{table}.name = "{name}"'
        " does so where the policy is far from the one that sampled; lower actor.optimizer.lr or "
        f"schedule.max_staleness = {config.schedule.max_staleness}"
    )


_WORDS: Mapping[str, Callable[[str, str, Shares, RunConfig], Words]] = {
    "cut_off": _cut_off,
    "no_spread": _no_spread,
    "failed": _failed,
    "over_age": _over_age,
    "clipped": _clipped,
    "rejected": _rejected,
}
"""Share -> its words; all_solved is a part of another."""


class Teller:
    """Tells each notice once when it begins to hold, on the rank that logs steps."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._steps = deque[Step](maxlen=WINDOW)
        self._held = dict[str, int]()
        """Name of a notice -> the last step with it."""

    def note(self, step: Step) -> list[str]:
        """Returns what is to be said after a step: notices that none of the last `WINDOW` had."""
        self._steps.append(step)
        every = find(tuple(self._steps), self._config)
        return [found.line for found in every if self._is_new(found.name, step["step"])]

    def note_skipped(self, step: int, skipped: Sequence[SkippedGroup]) -> list[str]:
        """Returns what is to be said while one of the `FIRST` batches is filled, if all groups
        that were skipped for it are alike.

        Args:
            skipped: for the batch of `step`, so far.
        """
        number = sum(not group.retired for group in skipped)
        kinds = {group.solved for group in skipped if not (group.retired or group.truncated)}
        least = BATCHES * self._config.schedule.prompts_per_step
        if number < least or len(kinds) > 1:
            return []
        name = "cut_off" if not kinds else "everybody" if kinds.pop() else "nobody"
        if not self._is_new(name, step):
            return []
        if name == "cut_off":
            _, words = _cut_off("all", "", {}, self._config)
        else:
            words = f"{name} solves them; {_explain(name, self._config)}"
        return [f"{UNLEARNED}: {number} prompt groups, skipped for step {step} so far: {words}"]

    def _is_new(self, name: str, step: int) -> bool:
        before, self._held[name] = self._held.get(name, -WINDOW), step
        return step - before >= WINDOW
