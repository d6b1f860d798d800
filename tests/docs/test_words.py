"""`scripts/words.py` finds listed words in prose and in names, and leaves quotations alone."""

from __future__ import annotations

from scripts.words import findings, words

LISTED = words()


def test_every_word_has_a_replacement() -> None:
    assert len(LISTED) > 10 and all(LISTED.values())


def test_listed_words_are_found_in_sentences_and_names() -> None:
    text = "A client is told.\ndef test_nobody_waits():\nIt goes on.\nIt went_on.\nTold"
    assert list(findings(text, LISTED)) == [(1, "told"), (2, "nobody"), (3, "goes on"), (4, "went on"), (5, "told")]


def test_parts_of_longer_words_are_not_found() -> None:
    assert not list(findings("untold standstill besiege nobodyelse bytells", LISTED))


def test_quoted_lines_are_left_alone() -> None:
    assert not list(findings('x = "she told me"  # quoted\n- told <!-- quoted -->\n/* told: quoted */', LISTED))
