"""Phrases of arithmetic: one operation, two operations, stories, questions that refer to the last result.

A phrase begins with its operators and a colon. {a}, {b} and {c} are numbers, {n} and {m} things, {p} a person.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from types import MappingProxyType

from calculator_numbers import Draw, everyday, signed
from calculator_talk import listed

SPOKEN: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "+": ("+", " + ", " + ", " plus ", " plus ", " plus ", " added to ", " and then plus "),
        "-": ("-", " - ", " - ", " minus ", " minus ", " minus ", " take away ", " less "),
        "*": ("*", " * ", " * ", " x ", " × ", " times ", " times ", " times ", " multiplied by "),
        "/": ("/", " / ", " ÷ ", " : ", " divided by ", " divided by ", " divided by ", " over "),
        "//": ("//", " // "),
    }
)
ASKING = listed("""What is {}?|what is {}|What's {}?|{}|{}|{} =|{}=?|Calculate {}|calculate {}|Compute {}.|compute {}
How much is {}?|how much is {}|Evaluate {}|Solve {}|Work out {}|What does {} equal?|Tell me {}|I need {}|Find {}.
Result of {}|Do you know {}?|What is the result of {}?|what do you get for {}?|What do I get from {}?|{} is?
give me {}|whats {}|{}?|What is the answer to {}?|How much does {} make?|What would {} be?|Solve this: {}|{} equals?
I want to know {}|Quick: {}|What about {}?|And {}?|and what is {}?|Now {}|{} makes what?|My question: {}""")
POLITE = listed("""{}|{}|{}|Please {}|please {}|Can you {}|can you {}?|Could you {}|Hey, {}|hi, {}|Ok, {}|So {}
{} please|{}, please|Now {}|Hello, {}|would you {}?|Can you please {}?|I want you to {}|Then {}""")
DOING = listed("""+:add {a} and {b}|+:add {a} to {b}|-:subtract {b} from {a}|-:take {b} from {a}|+:sum {a} and {b}
-:take away {b} from {a}|*:multiply {a} by {b}|*:multiply {a} and {b}|/:divide {a} by {b}|/:split {a} by {b}
-:reduce {a} by {b}|+:increase {a} by {b}|*:multiply {a} with {b}|+:put {a} and {b} together""")
NAMED = listed("""+:the sum of {a} and {b}|*:the product of {a} and {b}|-:the difference between {a} and {b}
-:the difference of {a} and {b}|/:the quotient of {a} and {b}|+:the total of {a} and {b}""")
NAMING = (
    *NAMED,
    *listed("""+:{a} and {b} together|/100*:{a}% of {b}|/100*:{a} percent of {b}|*:{a} groups of {b}|-:{b} less than {a}
+:{b} more than {a}|/:{a} split by {b}|/:{a} shared by {b}|/100*:{a}% of {b}|/100*:{a} percent of {b}"""),
)
SINGLE = listed("""*2:double {}|*2:twice {}|/2:half of {}|*3:triple {}|/4:a quarter of {}|+1:one more than {}
-1:one less than {}|*2:two times {}|/3:a third of {}|*2:the double of {}|/2:half {}|*12:a dozen times {}""")

FIRST = listed("""+:add {a} and {b}|+:add {a} to {b}|-:subtract {b} from {a}|*:multiply {a} by {b}
*:multiply {a} and {b}|/:divide {a} by {b}|+:take {a}, add {b}|-:take {a}, subtract {b}|*:take {a}, multiply it by {b}
+:start with {a}, add {b}|-:start with {a}, subtract {b}|*:start with {a}, multiply by {b}|/:take {a}, divide it by {b}
-:take {b} from {a}""")
THEN = listed("""+:add {c}|+:add {c} to it|-:subtract {c}|-:take away {c}|-:take {c} away|*:multiply by {c}
*:multiply it by {c}|*:multiply the result by {c}|/:divide by {c}|/:divide the result by {c}|/:divide it by {c}
*2:double it|/2:halve it|*2:double the result|*:multiply that by {c}|*:multiply by {c}|/:divide by {c}|+:plus {c}
-:minus {c}|*:times {c}""")
LINKS = (", then ", ", then ", " and then ", ", and then ", " then ", " and ", ". Then ", ", ", "; then ")
BETWEEN = (", ", ", then ", ", all ", " and then ", ", and all that ", ", the whole ", ", the result ")
AFTERWARDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "+": ("plus {c}", "+ {c}", "plus {c}"),
        "-": ("minus {c}", "- {c}", "minus {c}"),
        "*": ("times {c}", "* {c}", "times {c}", "multiplied by {c}"),
        "/": ("divided by {c}", "/ {c}", "divided by {c}"),
    }
)
WITH_NAME = listed("""*:multiply {} by {c}|/:divide {} by {c}|-:subtract {c} from {}|+:add {c} to {}|*2:double {}
*2:twice {}|/2:half of {}|*3:triple {}|/4:a quarter of {}|*:{} times {c}|+:{} plus {c}|-:{} minus {c}
/:{} divided by {c}|*:{} multiplied by {c}|*:{} * {c}""")
BEFORE_NAME = listed("*:{c} times {}|+:{c} plus {}|-:{c} minus {}|*:{c} multiplied by {}|-:subtract {} from {c}")

STORIES = listed("""+:I have {a} {n} and buy {b} more. How many {n} do I have?
*:{p} walks {b} miles a day. How far in {a} days?|+:{p} has {a} {n} and gets {b} more. How many now?
-:I had {a} {n} and gave away {b}. How many are left?|-:{p} had {a} {n} and lost {b}. How many {n} are left?
*:There are {a} boxes with {b} {n} each. How many {n} are there?
*:{p} buys {a} {n} for {b} dollars each. What is the price?|-:There were {a} {n}. {p} took {b}. How many remain?
/:{a} {n} are shared by {b} people. How many does each get?|/:{p} splits {a} {n} among {b} friends. How many for each?
+:{p} has {a} {n} and I have {b}. How many {n} do we have together?|*:A box holds {b} {n}. How many do {a} boxes hold?
+:{p} found {a} {n} on Monday and {b} on Tuesday. How many {n} in total?
-:{p} has {a} {n} and eats {b}. How many are left?|-:A shop had {a} {n} and sold {b}. How many does it still have?
*:One of the {n} costs {b} dollars. What do {a} cost?|/:{a} {n} fit in {b} boxes. How many {n} are in each box?
-:{p} has {a} dollars and spends {b}. How much is left?
+:A shop sold {a} {n} in the morning and {b} in the evening. How many {n} is that?
*:{p} reads {b} pages a day for {a} days. How many pages?|-:{p} has {a} {n}, I have {b}. How many more does {p} have?
*:{a} people have {b} {n} each. How many {n} in all?|+:{a} {n} and {b} {m} are on the table. How many things are there?
/:{p} pays {a} dollars for {b} {n}. What does one cost?|-:{p} wants {a} {n} and has {b}. How many are missing?
+:There are {a} {n} in a bag, and {p} adds {b}. How many are in it?""")
TWO_STEP_STORIES = listed("""+-:I have {a} {n}, buy {b} more and give away {c}. How many {n} are left?
+-:{p} has {a} {n}, gets {b} more and loses {c}. How many {n} are left?
-+:{p} had {a} {n}, sold {b} and bought {c}. How many now?
*+:There are {a} boxes with {b} {n} each, and {c} more {n}. How many {n} are there?
*-:{p} buys {a} boxes of {b} {n} and eats {c}. How many {n} are left?
+/:{p} has {a} {n} and {b} {m} and shares them among {c} friends. How many for each?
+*:{p} reads {a} pages in the morning and {b} in the evening. How many pages in {c} days?
-*:{p} earns {a} dollars a day and spends {b} of them. How much is left after {c} days?
*/:{a} bags with {b} {n} each are shared by {c} people. How many {n} does each get?
++:{p} has {a} {n}, I have {b} and my friend has {c}. How many {n} do we have together?
--:There were {a} {n}. {p} took {b} and I took {c}. How many remain?
+*:A box has {a} red and {b} blue {n}. How many {n} are in {c} boxes?
*+:{p} buys {a} {n} for {b} dollars each and a bag for {c} dollars. What is the price?
-/:{p} had {a} {n}, lost {b} and split the rest among {c} friends. How many for each?
**:There are {a} shelves with {b} boxes of {c} {n} each. How many {n} are there?
++:A shop sold {a} {n} on Monday, {b} on Tuesday and {c} on Friday. How many in total?
+-:On the bus are {a} people. {b} get on and {c} get off. How many people are on the bus?
--:{p} has {a} dollars, spends {b} on {n} and {c} on {m}. How much is left?""")
NOUNS = listed("""apples|pears|books|coins|cards|eggs|stones|pens|cups|nuts|roses|cookies|marbles|tickets|stamps|bananas
pencils|candies|shells|oranges|plates|chairs|flowers|balloons|keys|bottles|bricks|toys|cakes|lemons|stickers|photos
buttons|tomatoes|potatoes|trees|ducks|cows|horses|boxes of tea|songs|points|letters|beans|shirts|socks|hats|peaches""")
PEOPLE = listed("""Anna|Ben|Carl|Dora|Emma|Frank|Greta|Hans|Ida|Jack|Kim|Lea|Max|Nina|Otto|Paul|She|He|Tom|My friend
Peter|Mary|John|Susan|Alice|Bob|Eve|Laura|Mia|Noah|My mother|My brother|A boy|A girl|The teacher|Mr. Smith|Maria|Sam""")
AFTER = listed("""+:Now add {}|+:and plus {}?|+:Add {} to that|+:plus {}|+:What is that plus {}?|-:Now subtract {}
-:and minus {}?|-:Take away {}|-:minus {}|-:What is that minus {}?|*:Now multiply it by {}|*:times {}|*:and times {}?
*:What is that times {}?|*:Multiply that by {}|/:Divide it by {}|/:and divided by {}?|/:divided by {}
/:Now divide by {}|+:+ {}|-:- {}|*:* {}|/:/ {}|+:Add {}|-:Subtract {}|*:Multiply by {}|/:Divide by {}
-:Subtract {} from it|*2:Double it|*2:and doubled?|/2:Half of that|/2:What is half of it?|*2:Twice that
*3:Three times that|/2:Halve that|+:and then plus {}|*:then times {}|-:then minus {}|+:Now plus {}|*:Now times {}
-:Now minus {}|+1:One more|-1:One less""")


def courteous(rng: random.Random, text: str) -> str:
    """Return a request with a random degree of politeness and capitalization."""
    text = rng.choice(POLITE).format(text[0].lower() + text[1:]) if rng.random() < 0.5 else text
    return text[0].upper() + text[1:] if rng.random() < 0.5 else text


def asked(rng: random.Random, spoken: str) -> str:
    """Return a question about a phrase."""
    text = rng.choice(ASKING).format(spoken)
    return courteous(rng, text) if rng.random() < 0.4 else text


def operation(rng: random.Random) -> tuple[str, str]:
    """Return a random operator in natural notation and in Python's notation."""
    symbol = rng.choice("++++---****//") if rng.random() < 0.97 else "//"
    return rng.choice(SPOKEN[symbol]), symbol


def chained(a: str, first: str, b: str, second: str, c: str) -> str:
    """Return (a first b) second c in Python's notation, with parentheses only where needed."""
    inner = f"{a}{first}{b}"
    return f"({inner}){second}{c}" if first in "+-" and second[0] in "*/" else f"{inner}{second}{c}"


def one_step(rng: random.Random, left: Draw, right: Draw) -> tuple[str, str]:
    """Return a question with one operation on two numbers, and its expression."""
    kind, (a, x), (b, y) = rng.random(), signed(rng, left), signed(rng, right)
    if kind < 0.62:
        spoken, symbol = operation(rng)
        return asked(rng, a + spoken + b), x + symbol + y
    if kind < 0.7:
        symbol, spoken = rng.choice(SINGLE).split(":")
        return asked(rng, spoken.format(a)), x + symbol
    doing = rng.random() < 0.5
    symbol, spoken = rng.choice(DOING if doing else NAMING).split(":")
    text = spoken.format(a=a, b=b)
    return courteous(rng, text) if doing else asked(rng, text), x + symbol + y


def formula(rng: random.Random, count: int) -> tuple[str, str]:
    """Return a question with a formula of three or four numbers, half of them with parentheses, and its expression."""
    parts = [signed(rng, everyday)]
    for _ in range(count - 1):
        parts += [operation(rng), everyday(rng)]
    kind = rng.random()
    if kind < 0.55:
        first = rng.randrange(0, 2 * count - 3, 2)
        brackets = ("(", ")") if rng.random() < 0.93 else ("open bracket ", " close bracket")
        parts[first] = (brackets[0] + parts[first][0], "(" + parts[first][1])
        parts[first + 2] = (parts[first + 2][0] + brackets[1], parts[first + 2][1] + ")")
    elif kind < 0.57:
        parts = [("(", "("), *parts, (")", ")")]
    return asked(rng, "".join(spoken for spoken, _ in parts)), "".join(symbol for _, symbol in parts)


def two_steps(rng: random.Random) -> tuple[str, str]:
    """Return a question with two operations in words, and its expression."""
    (a, x), (b, y), (c, z) = (everyday(rng) for _ in range(3))
    kind = rng.random()
    if kind < 0.4:
        (first, begin), (second, end) = rng.choice(FIRST).split(":"), rng.choice(THEN).split(":")
        ending = rng.choice(("", "", "", ".", "?", ". What do I get?", ". What is the result?"))
        text = courteous(rng, (begin + rng.choice(LINKS) + end).format(a=a, b=b, c=c) + ending)
        return text, chained(x, first, y, second, z if "{c}" in end else "")
    if kind < 0.6:
        spoken, first = operation(rng)
        second = rng.choice("+-***//")
        end = rng.choice(AFTERWARDS[second]).format(c=c)
        return asked(rng, a + spoken + b + rng.choice(BETWEEN) + end), chained(x, first, y, second, z)
    if kind < 0.66:
        average = rng.choice(("the average of {} and {}", "the mean of {} and {}", "the average between {} and {}"))
        return asked(rng, average.format(a, b)), chained(x, "+", y, "/2", "")
    first, named = rng.choice(NAMED).split(":")
    named = named.format(a=a, b=b)
    if kind < 0.88:
        second, text = rng.choice(WITH_NAME).split(":")
        text, expression = text.format(named, c=c), chained(x, first, y, second, z if "{c}" in text else "")
    else:
        second, text = rng.choice(BEFORE_NAME).split(":")
        text, expression = text.format(named, c=c), f"{z}{second}({x}{first}{y})"
    return (courteous if text.split()[0] in ("multiply", "divide", "subtract", "add") else asked)(rng, text), expression


def story(rng: random.Random, stories: tuple[str, ...], most: int) -> tuple[str, str]:
    """Return a story with its question, and the expression."""
    (a, x), (b, y), (c, z) = (everyday(rng, most) for _ in range(3))
    symbols, text = rng.choice(stories).split(":")
    things = rng.sample(NOUNS, 2)
    text = text.format(a=a, b=b, c=c, n=things[0], m=things[1], p=rng.choice(PEOPLE))
    return text, chained(x, symbols[0], y, symbols[1], z) if len(symbols) == 2 else x + symbols + y
