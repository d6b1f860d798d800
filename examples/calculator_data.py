"""Questions for the calculator model: arithmetic, letters in words, chats; each with tool call and reply.

Questions are generated from a seed, by skill. Held-out questions are chosen by a hash of the expression, of the word or
of a chat's line, so that none of them occurs in training in any phrasing.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

from calculator_numbers import Draw, commas, decimal, digits, everyday, scaled, spoken_decimal, too_long, words
from calculator_steps import (
    AFTER,
    NOUNS,
    PEOPLE,
    STORIES,
    TWO_STEP_STORIES,
    asked,
    formula,
    one_step,
    story,
    two_steps,
)
from calculator_talk import HELP, NO_FUNCTIONS, NO_UNITS, ONE_LETTER, SLOTS, TOO_LONG, held_out_line, listed, phrase

from nano_inference.nanochat.calculator import calculate

PARTS = "bos|user_start|user_end|assistant_start|assistant_end|python_start|python_end|output_start|output_end"
SPECIALS = tuple(f"<|{part}|>" for part in listed(PARTS))
"""nanochat's special tokens in the order of their ids, which start at 256."""
BOS, USER, USER_END, ASSISTANT, ASSISTANT_END, PYTHON, PYTHON_END, OUTPUT, OUTPUT_END = range(256, 265)

COUNTING = listed("""How many {c} are in {w}?|how many {c} in {w}|How many {c}'s are in {w}?|how many {c}'s in {w}?
How many times does the letter {c} occur in {w}?|How many times does {c} appear in {w}?|How often is {c} in {w}?
How many letters {c} are there in {w}?|How many {c} are there in {w}?|Count the letter {c} in {w}|count {c} in {w}
How many {c}s are in {w}?|How many {c} does {w} have?|In {w}, how many {c} are there?|In the word {w}, count the {c}'s
number of {c} in {w}|What is the number of {c} in {w}?|How often does {c} occur in the word {w}?|letter {c} in {w}
How many times is the letter {c} in the word {w}?|How many of the letter {c} are in {w}?|Tell me how many {c} {w} has.
How many {c}'s does the word {w} contain?|{w}: how many {c}?|How many {c} do you see in {w}?|Count the {c} in {w}.
count the {c}'s in {w} please|How many {c}'s are in the word {w}?|How many {c} are in the word {w}?""")
OTHER_LETTER = listed(
    "And how many {}?|and {}?|What about {}?|How about the letter {}?|and the letter {}?|How many {}'s?"
)
OTHER_WORD = listed(
    "And in {}?|and in {}|What about {}?|How about {}?|and in the word {}?|Same for {}|And how many in {}?"
)
ALPHABET = "abcdefghijklmnopqrstuvwxyz"
WORDS = listed("""strawberry|mississippi|banana|raspberry|blueberry|letter|bookkeeper|committee|parallel|balloon|coffee
pepper|engine|weight|tensor|kernel|memory|sequence|attention|python|calculator|language|model|chatbot|computer|keyboard
window|garden|summer|winter|autumn|spring|monday|tuesday|thursday|saturday|january|february|october|november|december
teacher|school|pencil|paper|music|guitar|violin|trumpet|orchestra|mountain|river|ocean|island|desert|forest|valley
bridge|castle|village|city|country|kitchen|bottle|butter|cheese|tomato|potato|carrot|onion|garlic|cinnamon|chocolate
vanilla|pineapple|watermelon|grapefruit|cucumber|broccoli|elephant|giraffe|kangaroo|crocodile|butterfly|squirrel
penguin|dolphin|hamster|rabbit|tiger|zebra|happiness|success|address|possess|assess|tattoo|accommodation|millennium
occurrence|rhythm|hello|world|good|apple|tree|house|street|family|mother|father|sister|brother|friend|people|number
science|physics|chemistry|biology|history|geography|philosophy|psychology|dictionary|encyclopedia|abracadabra
hippopotamus|onomatopoeia|internet|telephone|television|hospital|restaurant|university|holiday|birthday|weather""")
SYLLABLES = listed("""ba|ber|bo|cha|con|da|der|do|el|en|er|ess|fi|ga|ger|he|il|in|ka|la|le|ll|lo|ma|me|mi|mo|na|ne|ni|oo
pa|pe|per|pi|po|qu|ra|re|ri|ro|sa|se|si|sh|ss|st|ta|te|ter|ti|to|tra|tt|ve|vi|wa|xy|zo""")

TOO_HARD = listed("""sqrt of {}|sqrt({})|the square root of {}|{} to the power of {}|{}^{}|{} ** {}|{} mod {}
{} % {}|{} squared|log of {}|the sine of {}|sin({})|the factorial of {}|{}!|the greater of {} and {}|{} cubed
{} modulo {}|the root of {}|the square of {}|the cube root of {}|the remainder of {} divided by {}|cos({})
the logarithm of {}|the cosine of {}|log({})|{} to the {}th power|the prime factors of {}|the maximum of {} and {}""")
TOO_HARD_LINES = listed("""Is {} prime?|Is {} even?|is {} odd?|Solve x + {} = {}|Which is greater, {} or {}?|Round {}
Is {} greater than {}?|what is {} in binary?|Convert {} to hexadecimal|Is {} divisible by {}?|x * {} = {}, what is x?
What comes after {}?|Count to {}|What is the integral of x?|What are the factors of {}?|differentiate x^{}
round {} to {}""")
UNITS = listed("""How many {v} are {a} {u}?|convert {a} {u} to {v}|What is {a} {u} in {v}?|{a} {u} in {v}
how many {v} is {a} {u}?|how many {v} are in {a} {u}?|{a} {u} to {v}|Convert {a} {u} into {v}|{a} {u} are how many {v}?
How much is {a} {u} in {v}?""")
TOO_LONG_LINES = listed("""{} + {}|{} * {}|{} - {}|{} / {}|{} plus {}|{} times {}|{} minus {}|{} divided by {}
the sum of {} and {}|half of {}|double {}|the product of {} and {}|{}+{}|{}*{}""")
NOT_COUNTED = listed("""How many vowels are in {}?|How many letters are in {}?|How many letters does {} have?|Spell {}
How long is the word {}?|Reverse {}|How many words are in {}?|What letters are in {}?|How many syllables has {}?
what is the first letter of {}?|What is the last letter of {}?|Spell the word {}|how long is {}?|write {} backwards
How many consonants are in {}?|count the vowels in {}|count the letters in {}|How do you spell {}?|Is {} a palindrome?
what rhymes with {}?|How many different letters are in {}?|which letter is most frequent in {}?
is there an {} in it?""")
UNCLEAR = listed(
    "{}|{} {}|{} {} {}|What is {}?|what is {}|Give me a {}|Is {} {}?|Can you {} a {}?|the {} of {}|Why {}?"
)
NO_RESULT = "The calculator gave no result."
CONTEXT = 512
"""Tokens of the model's context."""


class Turn(NamedTuple):
    """A question, the calculator's expression ("" for no call), and the reply with {} for the result."""

    question: str
    expression: str
    reply: str


def held_out_text(text: str) -> bool:
    """Return True for the tenth of expressions and words, chosen by hash, that is excluded from training."""
    return zlib.crc32(text.encode()) % 10 == 0


def result_text(expression: str) -> str | None:
    """Return the calculator's result as text; None if it has none."""
    value = calculate(expression)
    return None if value is None else str(value)


def computed(question: tuple[str, str]) -> Turn:
    """Return the turn of a question and its expression."""
    return Turn(*question, "The answer is {}.")


def word(rng: random.Random) -> str:
    """Return a random word: a real one, random syllables, or random letters; rarely two words."""
    kind = rng.random()
    if kind > 0.94:
        return f"{word(rng)[:12]} {word(rng)[:12]}".strip()
    if kind < 0.3:
        return rng.choice(WORDS)
    if kind < 0.6:
        return "".join(rng.choices(SYLLABLES, k=rng.randrange(1, 6)))[:14]
    letters = ALPHABET if kind < 0.85 else rng.sample(ALPHABET, 4)
    return "".join(rng.choices(letters, k=rng.randrange(2, 15)))


def counted(question: str, text: str, letter: str) -> Turn:
    """Return the turn that counts a letter in a word."""
    result = result_text(expression := f"'{text}'.count('{letter}')")
    verb, plural = ("is", "") if result == "1" else ("are", "'s")
    return Turn(question, expression, f"There {verb} {{}} {letter}{plural} in {text}.")


def letters(rng: random.Random) -> Turn:
    """Return a random question about the letters of a word."""
    text = word(rng)
    letter = rng.choice(text.replace(" ", "")) if rng.random() < 0.85 else rng.choice(ALPHABET)
    shown = rng.choice((*[text] * 20, text.capitalize(), text.capitalize(), text.upper()))
    quote = rng.choice(("", "", "", "'", '"'))
    mark = rng.choice(("", "", "", "", "'", '"'))
    written = letter.upper() if rng.random() < 0.05 else letter
    question = rng.choice(COUNTING).format(c=mark + written + mark, w=quote + shown + quote)
    return counted(question[0].lower() + question[1:] if rng.random() < 0.2 else question, text, letter)


def chat(rng: random.Random) -> Turn:
    """Return a random line that needs no tool; one in eight is a random word or number without a question."""
    if rng.random() < 0.88:
        question, reply = phrase(rng)
        return Turn(question, "", reply)
    things = [rng.choice((word(rng), everyday(rng)[0], rng.choice(WORDS + NOUNS + PEOPLE))) for _ in range(3)]
    return Turn(rng.choice(UNCLEAR).format(*things), "", HELP)


def beyond(rng: random.Random) -> Turn:
    """Return a question about numbers, units or words that the model declines."""
    kind, a, b = rng.random(), everyday(rng)[0], everyday(rng, 2)[0]
    if kind < 0.25:
        return Turn(asked(rng, rng.choice(TOO_HARD).format(a, b)), "", NO_FUNCTIONS)
    if kind < 0.4:
        return Turn(rng.choice(TOO_HARD_LINES).format(a, b), "", NO_FUNCTIONS)
    if kind < 0.6:
        pair = [too_long(rng), too_long(rng) if rng.random() < 0.5 else digits(1, 7)(rng)[0]]
        rng.shuffle(pair)
        pattern = rng.choice(TOO_LONG_LINES)
        return Turn(asked(rng, pattern.format(*(pair if pattern.count("{}") > 1 else [too_long(rng)]))), "", TOO_LONG)
    if kind < 0.8:
        unit, other = rng.choice(SLOTS["unit"]).split(":")
        return Turn(rng.choice(UNITS).format(a=a, u=unit, v=other), "", NO_UNITS)
    return Turn(rng.choice(NOT_COUNTED).format(word(rng)), "", ONE_LETTER)


def after(rng: random.Random, last: Turn) -> Turn:
    """Return a random question that refers to the last result."""
    if ".count(" in last.expression:
        _, text, _, letter, _ = last.expression.split("'")
        if rng.random() < 0.5:
            letter = rng.choice(text.replace(" ", ""))
            return counted(rng.choice(OTHER_LETTER).format(letter), text, letter)
        text = word(rng)
        return counted(rng.choice(OTHER_WORD).format(text), text, letter)
    symbol, question = rng.choice(AFTER).split(":")
    spoken, written = everyday(rng, 3)
    expression = f"{result_text(last.expression)}{symbol}{written if '{}' in question else ''}"
    return computed((question.format(spoken), expression))


Skill = Callable[[random.Random], Turn]


def numbers(left: Draw, right: Draw | None = None) -> Skill:
    """Return the skill of one operation on two numbers, in either order."""

    def draw(rng: random.Random) -> Turn:
        pair = [left, right or left]
        rng.shuffle(pair)
        return computed(one_step(rng, *pair))

    return draw


def either(*draws: Draw) -> Draw:
    """Return a draw from one of several."""
    return lambda rng: rng.choice(draws)(rng)


def made(make: Callable[[random.Random], tuple[str, str]]) -> Skill:
    """Return the skill of questions made with their expressions."""
    return lambda rng: computed(make(rng))


SKILLS: Mapping[str, tuple[float, Skill]] = MappingProxyType(
    {
        "numbers of up to three digits": (8, numbers(digits(1, 3))),
        "four or five digits": (4, numbers(digits(4, 5), digits(1, 5))),
        "six digits": (3, numbers(digits(6, 6), digits(1, 6))),
        "seven digits": (3, numbers(digits(7, 7), digits(1, 7))),
        "with commas (1,234,567)": (3, numbers(commas, either(commas, digits(1, 4)))),
        "decimals": (3, numbers(decimal, either(decimal, digits(1, 3)))),
        "in words, up to 99": (4, numbers(words(1, 2))),
        "in words, up to 999": (4, numbers(words(3, 3), words(1, 3))),
        "in words, up to 999,999": (7, numbers(words(4, 6), words(1, 6))),
        "in words, up to 9,999,999": (7, numbers(words(7, 7), words(1, 7))),
        "words and digits mixed": (3, numbers(words(1, 7), either(digits(1, 5), commas))),
        '"3 million", "2.5k", "three point two"': (3, numbers(either(scaled, spoken_decimal), everyday)),
        "formulas of three numbers": (6, made(partial(formula, count=3))),
        "formulas of four numbers": (2, made(partial(formula, count=4))),
        "two steps in words": (11, made(two_steps)),
        "stories": (5, made(partial(story, stories=STORIES, most=4))),
        "two-step stories": (6, made(partial(story, stories=TWO_STEP_STORIES, most=3))),
        "letters of words": (24, letters),
        "chats": (20, chat),
        "declined": (6, beyond),
    }
)
"""What training draws from, with weights; each name is a row of the published table."""
SECOND: Mapping[str, float] = MappingProxyType(
    {
        "numbers of up to three digits": 4,
        "four or five digits": 2,
        "in words, up to 999": 6,
        "in words, up to 999,999": 10,
        "in words, up to 9,999,999": 12,
        "formulas of four numbers": 5,
        "two steps in words": 20,
        "letters of words": 10,
        "chats": 40,
        "declined": 14,
    }
)
"""Weights after the first stage, if they differ: more of what is learned slowly."""
ARITHMETIC = tuple(name for name in SKILLS if name not in ("letters of words", "chats", "declined"))


def trainable(turn: Turn) -> bool:
    """Return True if nothing in a turn is held out."""
    if not turn.expression:
        return not held_out_line(turn.question)
    subject = turn.expression.split("'")[1] if "'" in turn.expression else turn.expression
    return not any(held_out_text(part) for part in subject.split())


def draw(rng: random.Random, last: Turn | None, second: bool = False) -> Turn:
    """Return a random turn for a stage of training; it may refer to the last one that called the calculator."""
    result = result_text(last.expression) if last else None
    names, weights = tuple(SKILLS), [weight for weight, _ in SKILLS.values()]
    if second:
        weights = [SECOND.get(name, weight) for name, weight in zip(names, weights, strict=True)]
    while True:
        if last is not None and result is not None and len(result) < 11 and rng.random() < 0.55:
            turn = after(rng, last)
        else:
            turn = SKILLS[rng.choices(names, weights)[0]][1](rng)
        if trainable(turn):
            return turn


def conversation(rng: random.Random, second: bool = False) -> list[Turn]:
    """Return one to eight random turns for a stage of training."""
    turns: list[Turn] = []
    last = None
    for _ in range(rng.choice((1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 3, 3, 4, 8))):
        turns.append(draw(rng, last, second))
        last = turns[-1] if turns[-1].expression else last
    return turns


def question_ids(question: str) -> list[int]:
    """Return a question as nanochat renders it, up to the start of the assistant's turn."""
    return [USER, *question.encode(), USER_END, ASSISTANT]


def render(turns: list[Turn], limit: int) -> tuple[list[int], list[int]]:
    """Return the token ids of the turns that fit into `limit`, and the mask: 1 for the assistant's own tokens."""
    ids, mask = [BOS], [0]
    for turn in turns:
        asked_ids, result = question_ids(turn.question), result_text(turn.expression) if turn.expression else None
        call = [PYTHON, *turn.expression.encode(), PYTHON_END] if turn.expression else []
        output = [OUTPUT, *result.encode(), OUTPUT_END] if result is not None else []
        reply = NO_RESULT if turn.expression and result is None else turn.reply.format(result)
        own = [*reply.encode(), ASSISTANT_END]
        if len(ids) + len(asked_ids) + len(call) + len(output) + len(own) > limit:
            break
        ids += asked_ids + call + output + own
        mask += [0] * len(asked_ids) + [1] * len(call) + [0] * len(output) + [1] * len(own)
    return ids, mask


def held_out_turns(n: int, seed: int, skill: str) -> list[Turn]:
    """Return n turns of a skill that training excludes and that have a result or need none."""
    rng, make = random.Random(seed), SKILLS[skill][1]
    found: list[Turn] = []
    while len(found) < n:
        turn = make(rng)
        if not trainable(turn) and (not turn.expression or result_text(turn.expression) is not None):
            found.append(turn)
    return found


def held_out_chains(n: int, seed: int) -> list[tuple[Turn, Turn]]:
    """Return n pairs of a question and a held-out question that refers to its result."""
    rng = random.Random(seed)
    found: list[tuple[Turn, Turn]] = []
    while len(found) < n:
        first = draw(rng, None)
        result = result_text(first.expression) if first.expression else None
        second = after(rng, first) if result is not None and len(result) < 11 else first
        if second is not first and not trainable(second) and result_text(second.expression) is not None:
            found.append((first, second))
    return found


def held_out(n: int, seed: int, kind: str = "both") -> list[tuple[str, str]]:
    """Return n held-out questions with their results; `kind` is "arithmetic", "letters" or "both"."""
    rng, weights = random.Random(seed), [SKILLS[name][0] for name in ARITHMETIC]
    found: list[tuple[str, str]] = []
    while len(found) < n:
        arithmetical = kind == "arithmetic" or (kind == "both" and len(found) % 2 == 0)
        make = SKILLS[rng.choices(ARITHMETIC, weights)[0]][1] if arithmetical else letters
        turn = make(rng)
        result = result_text(turn.expression)
        if result is not None and not trainable(turn):
            found.append((turn.question, result))
    return found


def is_right(reply_text: str, answer_text: str) -> bool:
    """Return True if the last number of a reply equals the answer, digit by digit."""
    found = re.findall(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?", reply_text)
    return bool(found) and found[-1] == answer_text
