"""Corruptions of text: noise in the characters, dropped words, cut length."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from random import Random

from sigmanens.errors import InputError
from sigmanens.evaluation.corruption.checks import check_seed, check_severity, sample_numbers

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def character_noise(text: str, random: Random, rate: float) -> str:
    """Each character that is not a space is mistyped with probability ``rate``: left out, replaced
    by another letter, followed by a superfluous one, or exchanged with the next, equally often.
    """
    out: list[str] = []
    held = ""  # goes behind the character that comes next
    for i, character in enumerate(text):
        mistyped, kind = random.random() < rate, random.randrange(4)
        letter = random.choice([c for c in LETTERS if c != character.lower()])
        if held or character.isspace() or not mistyped:
            out.append(character + held)
            held = ""
        elif kind == 1 or (kind == 3 and not text[i + 1 : i + 2].strip()):
            out.append(letter)
        elif kind == 2:
            out.append(character + letter)
        elif kind == 3:
            held = character
    return "".join(out) or text


def word_drop(text: str, random: Random, rate: float) -> str:
    """Each word is left out with probability ``rate``; the one of the largest draw stays."""
    words = text.split()
    draws = [random.random() for _ in words]
    kept = [w for w, u in zip(words, draws, strict=True) if u >= min(rate, max(draws))]
    return " ".join(kept) or text


def length_cut(text: str, random: Random, part: float) -> str:
    """The first ``part`` of the words, rounded up."""
    words = text.split()
    return " ".join(words[: math.ceil(part * len(words))]) or text


_FUNCTIONS: dict[str, tuple[Callable[[str, Random, float], str], tuple[float, ...]]] = {
    "character_noise": (character_noise, (0.02, 0.05, 0.1, 0.15, 0.25)),
    "word_drop": (word_drop, (0.1, 0.2, 0.3, 0.45, 0.6)),
    "length_cut": (length_cut, (0.8, 0.6, 0.45, 0.3, 0.15)),
}
TEXT_CORRUPTIONS: tuple[str, ...] = tuple(_FUNCTIONS)


def corrupt_text(
    texts: Sequence[str],
    name: str,
    severity: int,
    *,
    seed: int = 0,
    indices: Iterable[int] | None = None,
) -> list[str]:
    """Corrupt texts; each by its own random numbers.

    ==================  =====================================  ==============================
    name                what                                   severities 1 to 5
    ==================  =====================================  ==============================
    ``character_noise`` chance that a character is mistyped    .02, .05, .1, .15, .25
    ``word_drop``       chance that a word is missing          .1, .2, .3, .45, .6
    ``length_cut``      share of the words that is kept        .8, .6, .45, .3, .15
    ==================  =====================================  ==============================

    The draws depend on ``seed``, ``name`` and ``indices[i]``, not on the severity: what a severity
    drops, the next drops as well. White space between words becomes one space, except under
    ``character_noise``. A text of which nothing would be left stays as it is.

    Args:
        texts: N strings.
        name: one of ``TEXT_CORRUPTIONS``.
        severity: 1 to 5.
        seed: 0 or more.
        indices: the number of each text in its set; 0 … N−1 by default.

    Returns:
        N strings.

    Raises:
        InputError: an unknown name or severity, one string instead of several, or not one index
            for each text.
    """
    if name not in _FUNCTIONS:
        raise InputError(
            f"no corruption of text is called {name!r}; there are {', '.join(TEXT_CORRUPTIONS)}"
        )
    check_severity(severity)
    check_seed(seed)
    if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
        raise InputError("texts must be several strings, such as a list of str")
    numbers = sample_numbers(indices, len(texts), "texts")
    function, rates = _FUNCTIONS[name]
    rate = rates[severity - 1]
    return [
        function(text, Random(f"{seed}/{name}/{number}"), rate)
        for text, number in zip(texts, numbers, strict=True)
    ]
