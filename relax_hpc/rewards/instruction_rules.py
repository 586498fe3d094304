"""The 25 kinds of instruction of IFEval that a program can verify (arXiv:2311.07911, table 1).

Each rule is written from the paper's description and takes its parameters by the names that the
public data set gives them. Where a description leaves something open, the docstring says how it is
read here. Nothing is downloaded.
"""

import inspect
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from relax_hpc.rewards import languages

Rule = Callable[..., bool]

_RELATIONS = ("at least", "less than")
_WORD = re.compile(r"\w+")
_WHOLE_WORD = re.compile(r"[^\W_]+(?:['\u2019-][^\W_]+)*")
_ABBREVIATION = re.compile(
    r"\b(?:mr|mrs|ms|dr|prof|st|jr|sr|vs|etc|e\.g|i\.e|inc|ltd|co|no|fig|al|approx|[A-Z])\.$",
    re.IGNORECASE,
)
_LONGEST_ABBREVIATION = 10
_STOP = re.compile(
    r"(?<![.!?\u2026])[.!?\u2026]++[\"'\u201d\u2019)\]*_]*+(?=\s|$)|[\u3002\uff01\uff1f]+|\n\s*\n"
)
_BULLET = re.compile(r"^[ \t]*[*-][ \t]+(?=[^\s*-]|[*-]+[^\s*-])", re.MULTILINE)
_HIGHLIGHT = re.compile(r"\*\*(?=[^\s*])[^\n*]*(?<=\S)\*\*|\*(?=[^\s*])[^\n*]*(?<=\S)\*")
_FENCE = re.compile(r"```(?:json)?", re.IGNORECASE)
_TITLE = re.compile(r"<<([^\n<>]++)>>")
_DECORATION = r"[ \t>#*_-]*"
_MARKS = "\"'\u201c\u201d\u2018\u2019*_.,;:!?()[]#"
_CHOICES = ("My answer is yes.", "My answer is no.", "My answer is maybe.")


def follows(text: str, kind: str, arguments: Mapping[str, Any]) -> bool:
    """Whether a response follows one instruction. An empty one follows none.

    Args:
        text: of the response.
        kind: of the instruction, as in `RULES`.
        arguments: of the instruction; those that are None count as absent.

    Raises:
        ValueError: no such kind, or other arguments than it has.
    """
    if kind not in RULES:
        raise ValueError(f"instruction {kind!r} is not known; there are {', '.join(RULES)}")
    given = {name: value for name, value in arguments.items() if value is not None}
    takes = list(inspect.signature(RULES[kind]).parameters)[1:]
    if sorted(given) != sorted(takes):
        raise ValueError(
            f"instruction {kind!r} has kwargs ({', '.join(given)}); it takes ({', '.join(takes)})"
        )
    return bool(text.strip()) and RULES[kind](text, **given)


def has_keywords(text: str, keywords: list[str]) -> bool:
    """Each keyword occurs, be it within a longer word; case does not count."""
    return all(_occurrences(text, each) for each in keywords)


def has_keyword_often(text: str, keyword: str, frequency: int, relation: str) -> bool:
    """Counts as `has_keywords` does."""
    return _compares(_occurrences(text, keyword), relation, frequency)


def lacks_words(text: str, forbidden_words: list[str]) -> bool:
    """None occurs as a whole word; case does not count."""
    return not any(
        re.search(rf"(?<!\w){re.escape(each)}(?!\w)", text, re.IGNORECASE)
        for each in forbidden_words
    )


def has_letter_often(text: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    """A letter in either case."""
    return _compares(_occurrences(text, letter), let_relation, let_frequency)


def is_in_language(text: str, language: str) -> bool:
    """Told by script and frequent words, see `languages`."""
    return languages.is_in(text, language)


def has_paragraphs(text: str, num_paragraphs: int) -> bool:
    """Exactly that many paragraphs, none empty, divided by `***`, which may also open or close."""
    parts = [each.strip() for each in re.split(r"(?<!\*)\*{3}(?!\*)", text)]
    parts = parts[not parts[0] : len(parts) - (len(parts) > 1 and not parts[-1])]
    return all(parts) and len(parts) == int(num_paragraphs)


def has_words(text: str, num_words: int, relation: str) -> bool:
    """Runs of letters, digits and underscores: "don't" is two."""
    return _compares(len(_WORD.findall(text)), relation, num_words)


def has_sentences(text: str, num_sentences: int, relation: str) -> bool:
    """A sentence ends with a mark before a space, or with a blank line, and has a word in it.

    Abbreviations and initials do not end one.
    """
    return _compares(_sentences(text), relation, num_sentences)


def begins_paragraph(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Exactly that many paragraphs, divided by blank lines, and one's first word is as given.

    Case and marks around the word do not count.
    """
    parts = [each.strip() for each in re.split(r"\n[ \t]*\n", text) if each.strip()]
    number = int(nth_paragraph)
    if len(parts) != int(num_paragraphs) or not 1 <= number <= len(parts):
        return False
    first = parts[number - 1].split()[0].strip(_MARKS)
    return first.lower() == first_word.strip().lower()


def has_postscript(text: str, postscript_marker: str) -> bool:
    """A line begins with the marker, whatever its case and the spaces in it, and says something."""
    letters = [re.escape(each) for each in postscript_marker if not each.isspace()]
    marker = r"[ \t]*".join(letters)
    found = re.search(rf"^{_DECORATION}{marker}(.*)", text, re.I | re.M | re.S)
    return found is not None and _WORD.search(found[1]) is not None


def has_placeholders(text: str, num_placeholders: int) -> bool:
    """At least that many [placeholders] in square brackets."""
    return len(re.findall(r"\[[^\[\]\n]+\]", text)) >= int(num_placeholders)


def has_bullets(text: str, num_bullets: int) -> bool:
    """Exactly that many lines that begin with `* ` or `- `; a rule, as `* * *`, is none."""
    return len(_BULLET.findall(text)) == int(num_bullets)


def has_title(text: str) -> bool:
    """<<A title>> in double angular brackets, on one line."""
    return any(title.strip() for title in _TITLE.findall(text))


def is_a_choice(text: str) -> bool:
    """One of the three answers that the instruction offers is given, and no other of them."""
    return sum(each in text for each in _CHOICES) == 1


def has_highlights(text: str, num_highlights: int) -> bool:
    """At least that many *highlights*, on one line each; **bold** is one."""
    return len(_HIGHLIGHT.findall(text)) >= int(num_highlights)


def has_sections(text: str, section_spliter: str, num_sections: int) -> bool:
    """At least that many lines that begin with the word and a number."""
    word = re.escape(section_spliter.strip())
    heads = re.findall(rf"^{_DECORATION}{word}[ \t]*(\d+)", text, re.MULTILINE)
    return len(set(heads)) >= int(num_sections)


def is_json(text: str) -> bool:
    """A JSON object or array, and nothing else but a fence around it."""
    text = text.strip()
    if (opened := _FENCE.match(text)) and text.endswith("```"):
        text = text[opened.end() : -3]
    try:
        found = json.loads(text, parse_constant=_no_json)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict | list)


def repeats_prompt(text: str, prompt_to_repeat: str) -> bool:
    """Begins with the prompt, word for word; case does not count."""
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def is_two_responses(text: str) -> bool:
    """Two that differ, divided by six asterisks, which may also open or close."""
    parts = [each.strip() for each in re.split(r"(?<!\*)\*{6}(?!\*)", text)]
    parts = parts[not parts[0] : len(parts) - (len(parts) > 1 and not parts[-1])]
    return len(parts) == 2 and all(parts) and parts[0] != parts[1]


def is_upper_english(text: str) -> bool:
    """English, without a lower-case letter."""
    return text.isupper() and languages.reads_as_english(text)


def is_lower_english(text: str) -> bool:
    """English, without a capital letter."""
    return text.islower() and languages.reads_as_english(text)


def has_capital_words(text: str, capital_frequency: int, capital_relation: str) -> bool:
    """Words without a lower-case letter; I and A are two of them."""
    capital = sum(each.isupper() for each in _WHOLE_WORD.findall(text))
    return _compares(capital, capital_relation, capital_frequency)


def ends_with(text: str, end_phrase: str) -> bool:
    """The last words are the phrase; case and quotation marks around it all do not count."""
    return text.strip().strip('"').lower().endswith(end_phrase.strip().strip('"').lower())


def is_quoted(text: str) -> bool:
    """Double quotation marks around all of it."""
    text = text.strip()
    return len(text) > 2 and text[0] == text[-1] == '"'


def lacks_commas(text: str) -> bool:
    """No comma anywhere."""
    return "," not in text


RULES: dict[str, Rule] = {
    "keywords:existence": has_keywords,
    "keywords:frequency": has_keyword_often,
    "keywords:forbidden_words": lacks_words,
    "keywords:letter_frequency": has_letter_often,
    "language:response_language": is_in_language,
    "length_constraints:number_paragraphs": has_paragraphs,
    "length_constraints:number_words": has_words,
    "length_constraints:number_sentences": has_sentences,
    "length_constraints:nth_paragraph_first_word": begins_paragraph,
    "detectable_content:postscript": has_postscript,
    "detectable_content:number_placeholders": has_placeholders,
    "detectable_format:number_bullet_lists": has_bullets,
    "detectable_format:title": has_title,
    "detectable_format:constrained_response": is_a_choice,
    "detectable_format:number_highlighted_sections": has_highlights,
    "detectable_format:multiple_sections": has_sections,
    "detectable_format:json_format": is_json,
    "combination:repeat_prompt": repeats_prompt,
    "combination:two_responses": is_two_responses,
    "change_case:english_capital": is_upper_english,
    "change_case:english_lowercase": is_lower_english,
    "change_case:capital_word_frequency": has_capital_words,
    "startend:end_checker": ends_with,
    "startend:quotation": is_quoted,
    "punctuation:no_comma": lacks_commas,
}
"""Kind of instruction, by the name of the public data set -> rule."""


def _occurrences(text: str, words: str) -> int:
    return text.lower().count(words.strip().lower())


def _compares(count: int, relation: str, bound: float) -> bool:
    if relation not in _RELATIONS:
        raise ValueError(f"relation {relation!r} is not known; it is {' or '.join(_RELATIONS)}")
    return count >= bound if relation == "at least" else count < bound


def _sentences(text: str) -> int:
    count = begun = 0
    text = text.rstrip()
    for stop in _STOP.finditer(text):
        before = text[max(begun, stop.end() - _LONGEST_ABBREVIATION) : stop.end()]
        if _ABBREVIATION.search(before) and stop.end() < len(text):
            continue
        count += _WORD.search(text, begun, stop.end()) is not None
        begun = stop.end()
    return count + (_WORD.search(text, begun) is not None)


def _no_json(constant: str) -> object:
    raise ValueError(f"{constant} is not JSON")
