"""Overlap of boxes [left, top, right, bottom]: intersection over union."""

import re

from relax_hpc.environments.rewards.answers import final_text, marked
from relax_hpc.errors import ConfigError

REMEDY = "write a box, like [10, 20, 110, 220], or several"
MOST_BOXES = 50
"""Most boxes of a response; with more it has none."""
_NUMBER = r"\s*(-?\d{1,9}(?:\.\d{1,9})?)\s*"
_BOX = re.compile(rf"[\[(]{_NUMBER},{_NUMBER},{_NUMBER},{_NUMBER}[\])]", re.ASCII)
_BARE = re.compile(rf"{_NUMBER},{_NUMBER},{_NUMBER},{_NUMBER}", re.ASCII)

Box = tuple[float, ...]


def score(response: str, answer: str, *, in_thought: bool = False, threshold: float = 0.0) -> float:
    r"""Mean overlap of the boxes of response and answer, in pairs.

    Pairs are made greedily, the greatest overlap first; a box without partner counts 0.

    Args:
        response: `<answer>` counts, else the text after `Answer:` or in \boxed{}, else the last
            box.
        answer: one box or several, in the same units.
        in_thought: the prompt opened a thought.
        threshold: return 1 from that mean on, else 0; 0 returns the mean itself.
    """
    final = final_text(response, in_thought)
    said = marked(final)
    given = _boxes(final)[-1:] if said is None else _boxes(said)
    mean = _overlap(given, _boxes(answer))
    return float(mean >= threshold) if threshold else mean


def can_match(answer: str) -> bool:
    boxes = _boxes(answer)
    return 0 < len(boxes) <= MOST_BOXES and all(_area(box) > 0 for box in boxes)


def check(threshold: float) -> None:
    """Raises:
    ConfigError: no overlap can reach the threshold.
    """
    if not 0 <= threshold <= 1:
        raise ConfigError(f"args.threshold = {threshold}: use 0 to 1")


def _boxes(text: str) -> list[Box]:
    bare = _BARE.fullmatch(text)
    found = [bare.groups()] if bare else _BOX.findall(text)
    return [tuple(map(float, each)) for each in found]


def _overlap(given: list[Box], wanted: list[Box]) -> float:
    if not given or not wanted or len(given) > MOST_BOXES:
        return 0.0
    pairs = sorted(
        ((_iou(a, b), i, j) for i, a in enumerate(given) for j, b in enumerate(wanted)),
        reverse=True,
    )
    total, used_given, used_wanted = 0.0, set[int](), set[int]()
    for overlap, i, j in pairs:
        if i not in used_given and j not in used_wanted:
            total += overlap
            used_given.add(i)
            used_wanted.add(j)
    return total / max(len(given), len(wanted))


def _iou(a: Box, b: Box) -> float:
    common = (max(a[0], b[0]), max(a[1], b[1]), min(a[2], b[2]), min(a[3], b[3]))
    union = _area(a) + _area(b) - _area(common)
    return _area(common) / union if union else 0.0


def _area(box: Box) -> float:
    return max(0.0, box[2] - box[0]) * max(0.0, box[3] - box[1])
