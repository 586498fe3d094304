"""Finds duplicate prompts, and held-out prompts among the training data."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from relax_hpc.data.media.source import MediaSource
from relax_hpc.data.records import PromptRecord, Records, text_of
from relax_hpc.errors import ConfigError

WORDS = 13
"""Run of words that prompts of different origin rarely share."""
COMMON = 0.1
"""A run of `_FEW` words that this fraction of a set's prompts share is an instruction, or the like.
Its words are ignored, also where they continue what a question says."""
_FEW = 6
_CHUNK = 1024
_EXAMPLES = 3
_EACH_IS_A_WORD = "\u3040-\u30ff\u3400-\u9fff"
"""Letters of scripts without spaces."""
_WORD = re.compile(rf"[{_EACH_IS_A_WORD}]|[^\W{_EACH_IS_A_WORD}]+")
_Hashes = npt.NDArray[np.uint64]
_Numbers = npt.NDArray[np.int64]


class PromptOverlap(NamedTuple):
    """Prompts that occur elsewhere, too."""

    num_prompts: int = 0
    examples: Sequence[tuple[str, str]] = ()
    """File and line of the first of them, and of their matches."""


class LeftOut(NamedTuple):
    """Unusable rows, which cannot be compared."""

    num_rows: int = 0
    first: str = ""
    """File and line of the first, and the problem."""


class SetOverlap(NamedTuple):
    """Overlap of a held-out set with the training prompts."""

    num_prompts: int
    same: PromptOverlap
    """Prompts equal to training prompts, media included, up to white space."""
    alike: PromptOverlap
    """Other prompts that share `WORDS` consecutive words with a training prompt."""
    left_out: LeftOut


class Overlap(NamedTuple):
    num_train: int
    """Training prompts checked, from the first on."""
    of_train: int
    """Training prompts in all."""
    repeated: PromptOverlap
    """Training prompts that repeat earlier ones."""
    sets: Mapping[str, SetOverlap]
    left_out: LeftOut
    """Training rows."""


class _Heldout:
    """Hashes of the prompts of all held-out sets, concatenated."""

    def __init__(self, sets: Mapping[str, tuple[Records, int]]) -> None:
        self.texts: list[_Hashes] = []
        self.left_out: list[LeftOut] = []
        grams, rows, first = [_no_hashes()], [np.zeros(0, np.int64)], 0
        for prompts, count in sets.values():
            hashes, words, owners = _no_hashes(count), [_no_hashes()], [np.zeros(0, np.int64)]
            asked = _Texts(prompts, count)
            for start, texts in asked.chunks():
                hashes[start : start + len(texts)] = _text_hashes(texts)
                of_chunk, own = _word_hashes(texts)
                words.append(of_chunk)
                owners.append(own + start)
            telling, places = _telling(np.concatenate(words), np.concatenate(owners), count)
            self.texts.append(hashes)
            self.left_out.append(asked.left_out)
            grams.append(telling)
            rows.append(places + first)
            first += count
        order = np.argsort(np.concatenate(grams), kind="stable")
        self.rows = np.concatenate(rows)[order]
        """[pairs] prompt that has a gram, sorted by gram."""
        self.grams, starts = np.unique(np.concatenate(grams)[order], return_index=True)
        self.bounds = np.append(starts, len(order))
        self.met = np.full(first, -1, np.int64)
        """[prompts] first training prompt that shares a gram; -1 if none."""

    def meet(self, grams: _Hashes, owners: _Numbers) -> None:
        """Matches the grams of the next training prompts."""
        if not len(self.grams) or not len(grams):
            return
        places = np.searchsorted(self.grams, grams).clip(max=len(self.grams) - 1)
        hits = np.flatnonzero(self.grams[places] == grams)
        for hit in hits.tolist():
            rows = self.rows[self.bounds[places[hit]] : self.bounds[places[hit] + 1]]
            self.met[rows] = np.where(self.met[rows] < 0, owners[hit], self.met[rows])


def find(
    train: Records, sets: Mapping[str, tuple[Records, int]], most: int | None = None
) -> Overlap:
    """Finds prompts that are in the data more than once.

    Args:
        train: of the run.
        sets: held-out prompts by name of the set, and how many of them are used.
        most: training prompts to check; None is all.
    """
    count = len(train) if most is None else min(most, len(train))
    heldout, hashes, asked = _Heldout(sets), _no_hashes(count), _Texts(train, count)
    for start, texts in asked.chunks():
        hashes[start : start + len(texts)] = _text_hashes(texts)
        words, owners = _word_hashes(texts)
        grams, begins = _grams(words, owners, WORDS)
        heldout.meet(grams, owners[begins] + start)
    order = np.argsort(hashes, kind="stable")
    overlaps, first = {}, 0
    for (name, (prompts, used)), own, lacks in zip(
        sets.items(), heldout.texts, heldout.left_out, strict=True
    ):
        same, met = _first_of(hashes, order, own), heldout.met[first : first + used]
        alike = np.where(same < 0, met, -1)
        overlaps[name] = SetOverlap(
            used, _find(prompts, same, train), _find(prompts, alike, train), lacks
        )
        first += used
    repeated = _first_of(hashes, order, hashes)
    repeated[repeated == np.arange(count)] = -1
    return Overlap(count, len(train), _find(train, repeated, train), overlaps, asked.left_out)


def to_json(found: Any) -> Any:  # noqa: ANN401
    """Makes objects of findings, at any depth."""
    fields = found._asdict() if hasattr(found, "_asdict") else found
    if isinstance(fields, Mapping):
        return {name: to_json(each) for name, each in fields.items()}
    return fields


def lines(found: Overlap, num_examples: int = _EXAMPLES) -> list[str]:
    """Describes the findings for people; empty without any."""
    said = []
    if found.repeated.num_prompts:
        said.append(
            f"prompts.train: {found.repeated.num_prompts:,} of {found.num_train:,} prompts are "
            f"there before, {_format_examples(found.repeated, num_examples)}"
        )
    for name, each in found.sets.items():
        head = f"eval.{name}: {{:,}} of {each.num_prompts:,} prompts"
        if each.same.num_prompts:
            same = head.format(each.same.num_prompts)
            said.append(f"{same} are trained on, {_format_examples(each.same, num_examples)}")
        if each.alike.num_prompts:
            alike = head.format(each.alike.num_prompts)
            said.append(
                f"{alike} have {WORDS} words in a row with a training prompt in common, "
                f"{_format_examples(each.alike, num_examples)}"
            )
    if found.num_train < found.of_train:
        said.append(
            f"repeated and held-out prompts were looked for in the first {found.num_train:,} of "
            f"{found.of_train:,} training prompts; relax-hpc data looks at all"
        )
    return said


def _format_examples(found: PromptOverlap, num_examples: int) -> str:
    examples = found.examples[:num_examples]
    return "e.g. " + "; ".join(f"{one} as {other}" for one, other in examples)


def _find(prompts: Records, like: _Numbers, train: Records) -> PromptOverlap:
    """Args:
    prompts: that occur elsewhere.
    like: [prompts] index of each one's match in `train`; -1 for none.
    train: where the matches are.
    """
    places = np.flatnonzero(like >= 0)
    first = places[:_EXAMPLES].tolist()
    return PromptOverlap(
        len(places), [(prompts.where(n), train.where(int(like[n]))) for n in first]
    )


def _first_of(hashes: _Hashes, order: _Numbers, asked: _Hashes) -> _Numbers:
    """Index of each of `asked` in `hashes`, first occurrence by `order`; -1 if absent."""
    if not len(hashes):
        return np.full(len(asked), -1, np.int64)
    places = np.searchsorted(hashes, asked, sorter=order).clip(max=len(hashes) - 1)
    first = order[places]
    return np.where(hashes[first] == asked, first, -1)


class _Texts:
    """Texts of the first prompts; counts the unusable ones."""

    def __init__(self, prompts: Records, count: int) -> None:
        self._prompts, self._count = prompts, count
        self.left_out = LeftOut()

    def chunks(self) -> Iterator[tuple[int, list[str]]]:
        for start in range(0, self._count, _CHUNK):
            stop = min(start + _CHUNK, self._count)
            yield start, [self._of(index) for index in range(start, stop)]

    def _of(self, index: int) -> str:
        try:
            return _text(self._prompts[index])
        except ConfigError as error:
            num_rows, first = self.left_out
            self.left_out = LeftOut(num_rows + 1, first or str(error))
            return f"\0{self._prompts.where(index)}"


def _text(record: PromptRecord) -> str:
    """The prompt's text and, after a zero, identities of the media."""
    shown = "".join(f"\0{_identity(each)}" for each in record.media)
    if isinstance(record.prompt, str):
        return record.prompt + shown
    asked = (text_of(each["content"]) for each in record.prompt if each["role"] != "system")
    return "\n".join(asked) + shown


def _identity(medium: MediaSource) -> str:
    """Identifies a medium without opening files."""
    import xxhash

    if medium.frames:
        return " ".join(map(_identity, medium.frames))
    if medium.data is not None:
        return xxhash.xxh3_128_hexdigest(medium.data)
    return f"{medium.path}:{medium.offset}:{medium.size}"


def _text_hashes(texts: Sequence[str]) -> _Hashes:
    import xxhash

    plain = (" ".join(text.split()).encode() for text in texts)
    return np.fromiter(map(xxhash.xxh3_64_intdigest, plain), np.uint64, len(texts))


def _word_hashes(texts: Sequence[str]) -> tuple[_Hashes, _Numbers]:
    """Returns [words] the hash of each, and the text that has it."""
    import xxhash

    words = [_WORD.findall(text.partition("\0")[0].lower()) for text in texts]
    counts = [len(each) for each in words]
    every = (xxhash.xxh3_64_intdigest(word.encode()) for each in words for word in each)
    return np.fromiter(every, np.uint64, sum(counts)), np.repeat(np.arange(len(texts)), counts)


def _grams(words: _Hashes, owners: _Numbers, length: int) -> tuple[_Hashes, _Numbers]:
    """Returns [runs of `length` words within a text] the hash of each, and where it begins."""
    import xxhash

    windows = max(len(words) - length + 1, 0)
    sums = _no_hashes(windows)
    for place in range(length):  # wraps; an odd factor for each place tells orders apart
        factor = np.uint64(xxhash.xxh3_64_intdigest(bytes([place])) | 1)
        sums += words[place : place + windows] * factor
    begins = np.flatnonzero(owners[:windows] == owners[len(words) - windows :])
    return sums[begins], begins


def _telling(words: _Hashes, owners: _Numbers, count: int) -> tuple[_Hashes, _Numbers]:
    """Returns unique pairs of gram and prompt, without words that many prompts share."""
    shared = np.zeros(len(words) + 1, np.int64)
    few, begins = _grams(words, owners, _FEW)
    pairs = np.unique(np.stack([few, owners[begins].astype(np.uint64)]), axis=1)
    known, counts = np.unique(pairs[0], return_counts=True)
    common = begins[np.isin(few, known[counts > max(2, COMMON * count)])]
    np.add.at(shared, common, 1)
    np.add.at(shared, common + _FEW, -1)
    marked = np.concatenate([[0], np.cumsum(np.cumsum(shared[:-1]) > 0)])
    grams, begins = _grams(words, owners, WORDS)
    is_own = marked[begins + WORDS] == marked[begins]
    pairs = np.unique(np.stack([grams[is_own], owners[begins[is_own]].astype(np.uint64)]), axis=1)
    return pairs[0], pairs[1].astype(np.int64)


def _no_hashes(count: int = 0) -> _Hashes:
    return np.zeros(count, np.uint64)
