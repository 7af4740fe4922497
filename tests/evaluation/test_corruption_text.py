"""Corruption of text: severity, nesting, seeding, refusals."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.oracles.corruption import edit_distance

from sigmanens.errors import InputError
from sigmanens.evaluation.corruption import SEVERITIES, TEXT_CORRUPTIONS, corrupt_text

TEXTS = [
    "a gripping story , told with warmth and without a single false note",
    "The second half drags badly; I left before the end.",
    "it is hard to imagine anyone who would not be charmed by these two performances",
    "neither funny nor suspenseful nor particularly well drawn",
]
words = st.text("abcdéß5.,-Ω", min_size=1, max_size=6)
sentences = st.lists(words, min_size=1, max_size=12).map(" ".join)


@pytest.mark.parametrize("name", TEXT_CORRUPTIONS)
def test_severity_grows(name: str) -> None:
    texts = TEXTS * 10
    found = []
    for severity in SEVERITIES:
        out = corrupt_text(texts, name, severity)
        found.append(sum(edit_distance(a, b) for a, b in zip(texts, out, strict=True)))
    assert found[0] > 0
    assert found == sorted(set(found))


@settings(max_examples=30)
@given(sentences, st.integers(0, 100))
def test_what_one_severity_drops_the_next_drops_too(text: str, seed: int) -> None:
    for name in ("word_drop", "length_cut"):
        kept = [text.split()]
        for severity in SEVERITIES:
            (out,) = corrupt_text([text], name, severity, seed=seed)
            remaining = iter(kept[-1])
            assert all(word in remaining for word in out.split())  # a subsequence
            assert out
            kept.append(out.split())


@settings(max_examples=30)
@given(st.lists(sentences, min_size=2, max_size=5), st.sampled_from(TEXT_CORRUPTIONS))
def test_each_text_by_its_own_index(texts: list[str], name: str) -> None:
    whole = corrupt_text(texts, name, 4, seed=3)
    parts = [corrupt_text([t], name, 4, seed=3, indices=[i])[0] for i, t in enumerate(texts)]
    assert parts == whole
    assert all(whole)


def test_values() -> None:
    ten = "one two three four five six seven eight nine ten"
    cut = [corrupt_text([ten], "length_cut", s)[0] for s in SEVERITIES]
    assert cut == [
        "one two three four five six seven eight",
        "one two three four five six",
        "one two three four five",
        "one two three",
        "one two",
    ]
    same = [" ".join(["word"] * 2000)]
    for severity, rate in zip(SEVERITIES, (0.1, 0.2, 0.3, 0.45, 0.6), strict=True):
        (left,) = corrupt_text(same, "word_drop", severity)
        assert len(left.split()) / 2000 == pytest.approx(1 - rate, abs=0.03)
    for severity, rate in zip(SEVERITIES, (0.02, 0.05, 0.1, 0.15, 0.25), strict=True):
        texts = ["q"] * 4000
        out = corrupt_text(texts, "character_noise", severity)
        # One in four of the mistyped letters would be left out, but then nothing would be left.
        changed = sum(a != b for a, b in zip(texts, out, strict=True))
        assert changed / 4000 == pytest.approx(0.75 * rate, abs=0.02)


def test_all_kinds_of_typing_error_occur() -> None:
    out = corrupt_text(["ab"] * 400, "character_noise", 5)
    assert {"ba", "a", "b"} <= set(out)
    assert any(len(text) == 3 for text in out)
    assert any(len(text) == 2 and text not in ("ab", "ba") for text in out)


@pytest.mark.parametrize("name", TEXT_CORRUPTIONS)
def test_seeds_differ_and_the_global_state_is_left_alone(name: str) -> None:
    before = random.getstate()
    first = corrupt_text(TEXTS, name, 5)
    assert random.getstate() == before
    assert corrupt_text(TEXTS, name, 5) == first
    if name != "length_cut":
        assert corrupt_text(TEXTS, name, 5, seed=1) != first
        twice = corrupt_text([TEXTS[0]] * 2, name, 5)
        assert twice[0] != twice[1]


@pytest.mark.parametrize("name", TEXT_CORRUPTIONS)
def test_empty_texts_stay(name: str) -> None:
    assert corrupt_text(["", "   "], name, 5) == ["", "   "]
    assert corrupt_text([], name, 5) == []


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: corrupt_text(TEXTS, "spoonerism", 1), "spoonerism.*word_drop"),
        (lambda: corrupt_text(TEXTS, "word_drop", 0), "severity is 0"),
        (lambda: corrupt_text("one text", "word_drop", 1), "several strings"),
        (lambda: corrupt_text([b"x"], "word_drop", 1), "several strings"),  # type: ignore[list-item]
        (lambda: corrupt_text(TEXTS, "word_drop", 1, indices=[0]), "1 indices for 4 texts"),
    ],
)
def test_refusals(call, message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()
