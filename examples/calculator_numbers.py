"""Numbers as people write them: digits, commas, decimals, English words, "3 million"; with Python's notation."""

from __future__ import annotations

import random
from collections.abc import Callable

from calculator_talk import listed

Spoken = tuple[str, str]
"""A number in a question's notation and in Python's."""
Draw = Callable[[random.Random], Spoken]

SMALL = listed("""zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|thirteen|fourteen|fifteen|sixteen
seventeen|eighteen|nineteen""")
TENS = listed("twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety")
SCALES = ((1_000_000, "million"), (1_000, "thousand"), (100, "hundred"))


def in_words(value: int, hyphen: str = "-", conjunction: str = "") -> str:
    """Return a number from 0 to 999,999,999 in English words; `conjunction` ("and ") precedes the last two digits."""
    if value < 20:
        return SMALL[value]
    if value < 100:
        tens, ones = divmod(value, 10)
        return TENS[tens - 2] + (hyphen + SMALL[ones] if ones else "")
    scale, name = next(pair for pair in SCALES if value >= pair[0])
    many, rest = divmod(value, scale)
    text = f"{in_words(many, hyphen, conjunction)} {name}"
    joint = " " + (conjunction if rest < 100 else "")
    return text + (joint + in_words(rest, hyphen, conjunction) if rest else "")


def from_words(text: str) -> int:
    """Return the value of a number in English words; the inverse of `in_words` in each style, also of "a hundred"."""
    total = group = 0
    for word in text.lower().replace("-", " ").replace(",", " ").split():
        if word in SMALL:
            group += SMALL.index(word)
        elif word in TENS:
            group += 10 * TENS.index(word) + 20
        elif word == "hundred":
            group *= 100
        elif word in ("thousand", "million"):
            total, group = total + group * (1_000 if word == "thousand" else 1_000_000), 0
        elif word == "a":
            group += 1
        elif word != "and":
            raise ValueError(f"not a number in words: {text!r}")
    return total + group


def sized(rng: random.Random, digits: int) -> int:
    """Return a random number of exactly `digits` digits; one in six has only one or two that are not zero."""
    value = rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)
    if digits > 2 and rng.random() < 0.17:
        value -= value % 10 ** rng.randrange(1, digits)
        value += rng.choice((0, 0, rng.randrange(1, 10), rng.randrange(10, 100)))
    return value


def digits(least: int, most: int) -> Draw:
    """Return a draw of numbers in digits, without commas."""

    def draw(rng: random.Random) -> Spoken:
        value = str(sized(rng, rng.randint(least, most)))
        return value, value

    return draw


def commas(rng: random.Random) -> Spoken:
    """Return a number of four to seven digits with commas; one in five has decimals."""
    value, part = sized(rng, rng.randint(4, 7)), f".{rng.randrange(1, 100):02}" if rng.random() < 0.2 else ""
    return f"{value:,}{part}", f"{value}{part}"


def decimal(rng: random.Random) -> Spoken:
    """Return a number with one or two decimals."""
    whole = sized(rng, rng.choice((1, 1, 2, 2, 3, 3, 4, 5)))
    value = f"{whole}.{rng.randrange(1, 10) if rng.random() < 0.5 else f'{rng.randrange(1, 100):02}'}"
    return value, value


def words(least: int, most: int) -> Draw:
    """Return a draw of numbers in English words with the given numbers of digits."""

    def draw(rng: random.Random) -> Spoken:
        value = sized(rng, rng.randint(least, most))
        hyphen, conjunction = rng.choice("-- "), rng.choice(("", "", "and "))
        text = in_words(value, hyphen, conjunction)
        if text.startswith("one ") and rng.random() < 0.25:
            text = "a" + text.removeprefix("one")
        if value % 100 == 0 and 1000 < value < 10_000 and value % 1000 and rng.random() < 0.4:
            text = f"{in_words(value // 100, hyphen)} hundred"
        return text, str(value)

    return draw


def spoken_decimal(rng: random.Random) -> Spoken:
    """Return a decimal number in words: "three point two five"."""
    whole, part = sized(rng, rng.choice((1, 1, 2))), str(rng.randrange(1, 10 ** rng.choice((1, 1, 2))))
    return f"{in_words(whole)} point {' '.join(SMALL[int(digit)] for digit in part)}", f"{whole}.{part}"


def scaled(rng: random.Random) -> Spoken:
    """Return digits before a scale: "3 million", "2.5 million", "40 thousand", "7 hundred", "5k"."""
    scale, name, most = rng.choice(
        ((1_000_000, " million", 9), (1_000, " thousand", 999), (1_000, "k", 99), (100, " hundred", 19))
    )
    tenths = rng.randrange(1, most * 10) if scale > 100 and rng.random() < 0.3 else 10 * rng.randint(1, most)
    whole, part = divmod(tenths, 10)
    return f"{whole}{f'.{part}' if part else ''}{name}", str(tenths * scale // 10)


def everyday(rng: random.Random, most: int = 4) -> Spoken:
    """Return a number as in a longer question: mostly of few digits, in any notation."""
    kind = rng.random()
    if kind < 0.62:
        return digits(1, rng.choice((1, 2, 2, 3, 3, most)))(rng)
    if kind < 0.86:
        return words(1, rng.choice((1, 2, 2, 3, most)))(rng)
    if kind < 0.93:
        return decimal(rng)
    return scaled(rng) if kind > 0.97 and most > 3 else digits(most, most)(rng)


def signed(rng: random.Random, draw: Draw) -> Spoken:
    """Return a number of a draw, rarely with a minus sign or "negative" before it."""
    spoken, written = draw(rng)
    if rng.random() > 0.03:
        return spoken, written
    return (f"-{spoken}" if spoken[0].isdigit() and rng.random() < 0.6 else f"negative {spoken}"), f"-{written}"


def too_long(rng: random.Random) -> str:
    """Return a number of more than seven digits, in digits or words."""
    kind, value = rng.random(), sized(rng, rng.choice((8, 8, 9, 9, 10, 11, 12)))
    if kind < 0.6:
        return str(value)
    if kind < 0.8:
        return f"{value:,}"
    return in_words(sized(rng, rng.choice((8, 9)))) if kind < 0.9 else f"{rng.choice(('two', 'a', '5', '12'))} billion"
