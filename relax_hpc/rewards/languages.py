"""Which language a text is in, as far as letters and frequent words tell. Nothing is downloaded.

A script that one language alone has here tells it. Languages that share a script are told apart by
their most frequent words and by letters that the others do not have: a few sentences are enough, a
name or a formula is not.
"""

import re
import unicodedata
from collections import Counter
from typing import NamedTuple

_ENOUGH = 0.6
"""Fraction of the letters that is to be of the language's script."""
_LOOKED_AT = 20_000
"""Characters from the front in which words are counted."""


class Language(NamedTuple):
    """The marks of a language."""

    scripts: tuple[str, ...]
    """First words of the Unicode names of letters."""
    words: frozenset[str] = frozenset()
    """Frequent words; none where the script is enough."""
    letters: str = ""
    """Letters that languages of the same script do not have."""


def _of(script: str, words: str, letters: str = "") -> Language:
    return Language((script,), frozenset(words.split()), letters)


LANGUAGES: dict[str, Language] = {
    "en": _of("LATIN", "the of and to in is that it for was on are with as be this have from at "
              "by not or you which an were they but he she we can will has i my your our their"),
    "es": _of("LATIN", "el la de que y en los las un una por con para es del se no al lo como más "
              "su pero sus ha este esta son muy también cuando hay está mi", "ñ¿¡"),
    "pt": _of("LATIN", "o a de que e em os as um uma por com para é do da não no na se mais dos "
              "das ao como mas foi são seu sua ou pelo pela também muito você", "ãõ"),
    "fr": _of("LATIN", "le la les de des du et un une est en que qui dans pour pas sur au aux ce "
              "cette il elle nous vous je ne plus par avec sont mais ou", "œùèêë"),
    "de": _of("LATIN", "der die das und ist nicht ein eine zu den dem mit von auf für sich es im "
              "auch als wie ich sie er wir oder aber werden sind des wird kann", "ß"),
    "it": _of("LATIN", "il lo la i gli le di che e un una è in per non con del della dei sono si "
              "come più ma anche questo questa nel nella al alla ha mi ci", "ìò"),
    "pl": _of("LATIN", "i w na z do się nie jest to że o a jak po ale za od co są dla przez tak "
              "czy lub oraz być tym który która może już bardzo ze", "ąęłśźżń"),
    "vi": _of("LATIN", "và là của có không một các những được cho trong với này đã tôi bạn người "
              "để khi như từ đến cũng thì ở rất sẽ", "đơưạảấầẩậắằặẹẻếềểệỉịọỏốồổộớờởợụủứừửựỳỹ"),
    "sw": _of("LATIN", "na ya wa kwa ni katika la za kuwa hii huu hiyo au yake kama lakini pia "
              "sana watu mtu yangu yako moja sisi wewe mimi cha vya hivyo ili kila"),
    "fi": _of("LATIN", "ja on ei se että oli hän ovat mutta kun tai joka myös niin kuin sen mitä "
              "tämä minä olen voi hyvin ole siitä jos vain sekä"),
    "ru": _of("CYRILLIC", "и в не на я что он с как это по но они к у из за мы так от же вы для "
              "был была были есть или очень быть его", "ыэё"),
    "uk": _of("CYRILLIC", "і в не на що він з як це та до у із за ми так від для був була є або "
              "дуже бути його але також який", "іїєґ"),
    "bg": _of("CYRILLIC", "и в не на да се е от за че той с по но са като това ще съм сме му или "
              "към беше най който много те има което"),
    "ar": _of("ARABIC", "في من على إلى أن هذا هذه التي الذي كان لا ما عن مع هو هي ثم أو كل بعد قد "
              "لم كما بين و", "ةىإأؤئ"),
    "fa": _of("ARABIC", "و در به از که این است را با برای آن یک خود تا کرد بر هم نیز شده می های ما "
              "من او هر باید اما ها"),
    "ur": _of("ARABIC", "کے میں کی ہے اور سے کا کو نے ہیں پر یہ کہ ایک اس بھی تھا لیے ہو وہ تو "
              "نہیں کر جو", "ٹڈڑےںھہ"),
    "hi": _of("DEVANAGARI", "के में की है और से का को ने हैं पर यह कि एक इस भी था लिए हो वह तो नहीं "
              "कर जो मैं आप हम"),
    "mr": _of("DEVANAGARI", "आणि आहे च्या मध्ये हे या ते नाही होते एक आहेत मी तो ती करून तर पण किंवा "
              "साठी आपण असे होता केले खूप", "ळ"),
    "ne": _of("DEVANAGARI", "र छ को मा लाई हो छन् यो भने एक पनि गर्न गर्ने थियो बाट हुन्छ तर म हामी "
              "तपाईं धेरै गरेको भएको हुन् लागि छैन"),
    "he": Language(("HEBREW",)),
    "bn": Language(("BENGALI",)),
    "pa": Language(("GURMUKHI",)),
    "gu": Language(("GUJARATI",)),
    "ta": Language(("TAMIL",)),
    "te": Language(("TELUGU",)),
    "kn": Language(("KANNADA",)),
    "ml": Language(("MALAYALAM",)),
    "th": Language(("THAI",)),
    "ko": Language(("HANGUL",)),
    "ja": Language(("HIRAGANA", "KATAKANA", "CJK")),
    "zh": Language(("CJK",)),
}  # fmt: skip


def is_in(text: str, language: str) -> bool:
    """Whether a text is in a language.

    Args:
        text: with some words in it.
        language: code of it, as in `LANGUAGES`.

    Raises:
        ValueError: there is no way to tell this language.
    """
    if language not in LANGUAGES:
        raise ValueError(f"language {language!r} cannot be told; there are {', '.join(LANGUAGES)}")
    wanted, scripts = LANGUAGES[language], _scripts(text)
    if sum(scripts[each] for each in wanted.scripts) < max(1, _ENOUGH * scripts.total()):
        return False
    if language in ("ja", "zh"):
        return bool(scripts["HIRAGANA"] + scripts["KATAKANA"]) is (language == "ja")
    marks = _marks(text, wanted.scripts)
    return not wanted.words or 0 < marks[language] == max(marks.values())


def reads_as_english(text: str) -> bool:
    """Whether a text is of Latin letters, and no other language is more likely than English."""
    scripts = _scripts(text)
    if scripts["LATIN"] < max(1, _ENOUGH * scripts.total()):
        return False
    marks = _marks(text, ("LATIN",))
    return marks["en"] == max(marks.values())


def _scripts(text: str) -> Counter[str]:
    letters = Counter(letter for letter in text if letter.isalpha())
    found = Counter[str]()
    for letter, count in letters.items():
        found[unicodedata.name(letter, "?").split()[0]] += count
    return found


def _marks(text: str, scripts: tuple[str, ...]) -> dict[str, int]:
    """Counts frequent words, and words with letters of their own, of each language of a script."""
    text = unicodedata.normalize("NFC", text[:_LOOKED_AT]).lower()
    words = Counter(re.findall(r"[^\W\d_](?:[^\W\d_]|[\u0900-\u0963])*|[¿¡]", text))
    letters = {name: set(each.letters) for name, each in LANGUAGES.items()}
    return {
        name: sum(
            count * ((word in each.words) + bool(letters[name] & set(word)))
            for word, count in words.items()
        )
        for name, each in LANGUAGES.items()
        if each.scripts == scripts
    }
