"""Questions for the calculator model: arithmetic, letters in words, small talk; each with tool call and reply.

Questions are generated from a seed. Held-out questions are chosen by a hash of the expression or of the word, so that
neither occurs in training in any phrasing.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from nano_inference.nanochat.calculator import calculate


def listed(text: str) -> tuple[str, ...]:
    """Split a text at bars and newlines."""
    return tuple(text.replace("\n", "|").split("|"))


PARTS = "bos|user_start|user_end|assistant_start|assistant_end|python_start|python_end|output_start|output_end"
SPECIALS = tuple(f"<|{part}|>" for part in listed(PARTS))
"""nanochat's special tokens in the order of their ids, which start at 256."""
BOS, USER, USER_END, ASSISTANT, ASSISTANT_END, PYTHON, PYTHON_END, OUTPUT, OUTPUT_END = range(256, 265)

NUMBERS = listed("zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve")
SPOKEN: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "+": ("+", " + ", " + ", " plus ", " plus ", " added to "),
        "-": ("-", " - ", " - ", " minus ", " minus "),
        "*": ("*", " * ", " x ", " × ", " times ", " times ", " multiplied by "),
        "/": ("/", " / ", " ÷ ", " : ", " divided by ", " divided by ", " over "),
        "//": ("//", " // "),
    }
)
ASKING = listed("""What is {}?|what is {}|What's {}?|{}|{}|{} =|{}=?|Calculate {}|calculate {}|Compute {}.|compute {}
How much is {}?|how much is {}|Evaluate {}|Solve {}|Work out {}|What does {} equal?|Tell me {}|I need {}|Find {}.
Result of {}|Do you know {}?|What is the result of {}?|what do you get for {}?|What do I get from {}?|{} is?
give me {}""")
POLITE = listed("""{}|{}|{}|Please {}|please {}|Can you {}|can you {}?|Could you {}|Hey, {}|hi, {}|Ok, {}|So {}
{} please|{}, please|Now {}""")
DOING = listed("""+:add {a} and {b}|+:add {a} to {b}|-:subtract {b} from {a}|-:take {b} from {a}
-:take away {b} from {a}|*:multiply {a} by {b}|*:multiply {a} and {b}|/:divide {a} by {b}|/:split {a} by {b}""")
NAMING = listed("""+:the sum of {a} and {b}|*:the product of {a} and {b}|-:the difference between {a} and {b}
+:{a} and {b} together|-:the difference of {a} and {b}|/:the quotient of {a} and {b}|+:the total of {a} and {b}
/100*:{a}% of {b}|/100*:{a} percent of {b}|*:{a} groups of {b}|-:{b} less than {a}|+:{b} more than {a}
/:{a} split by {b}|/:{a} shared by {b}""")
SINGLE = listed(
    "*2:double {}|*2:twice {}|/2:half of {}|*3:triple {}|/4:a quarter of {}|+1:one more than {}|-1:one less than {}"
)
STORIES = listed("""+:I have {a} {n} and buy {b} more. How many {n} do I have?
*:{p} walks {b} miles a day. How far in {a} days?|+:{p} has {a} {n} and gets {b} more. How many now?
-:I had {a} {n} and gave away {b}. How many are left?|-:{p} had {a} {n} and lost {b}. How many {n} are left?
*:There are {a} boxes with {b} {n} each. How many {n} are there?
*:{p} buys {a} {n} for {b} dollars each. What is the price?
/:{a} {n} are shared by {b} people. How many does each get?|/:{p} splits {a} {n} among {b} friends. How many for each?
-:There were {a} {n}. {p} took {b}. How many remain?|+:{p} has {a} {n} and I have {b}. How many {n} do we have together?
*:A box holds {b} {n}. How many do {a} boxes hold?""")
NOUNS = listed("apples|pears|books|coins|cards|eggs|stones|pens|cups|nuts|roses|cookies|marbles|tickets|stamps|bananas")
PEOPLE = listed("Anna|Ben|Carl|Dora|Emma|Frank|Greta|Hans|Ida|Jack|Kim|Lea|Max|Nina|Otto|Paul|She|He|Tom|My friend")
AFTER = listed("""+:Now add {}|+:and plus {}?|+:Add {} to that|+:plus {}|+:What is that plus {}?|-:Now subtract {}
-:and minus {}?|-:Take away {}|-:minus {}|-:What is that minus {}?|*:Now multiply it by {}|*:times {}|*:and times {}?
*:What is that times {}?|*:Multiply that by {}|/:Divide it by {}|/:and divided by {}?|/:divided by {}
/:Now divide by {}""")

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

HELP = "I calculate and count letters. Try: What is 12 * 34? Or: How many r are in strawberry?"
SMALL_TALK: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        HELP: listed("""What can you do?|what can you do|Help|help|help me|What can I ask you?|How can you help me?
What do you know?|How do you work?|What do you do?|Can you help me?|What should I ask?|Give me an example"""),
        "Hello! What shall I calculate or count?": listed("""Hello|hello|Hello!|Hi|hi|Hi!|hi there|Hello there|Hey|hey
Good morning|Good evening|Good day|hello, how are you?|How are you?|Hi, how is it going?|Good afternoon|Hallo
hello?"""),
        "I am a very small nanochat model with a calculator.": listed("""Who are you?|who are you
What are you?|who r u|What is your name?|what's your name?|Are you a robot?|Are you human?|Who made you?
Tell me about yourself|Are you an AI?|What model are you?|Introduce yourself|what are you"""),
        "You are welcome!": listed("""Thanks|thanks|Thank you|thank you|Thanks!|Thank you!|thx|Great, thanks|ok thanks
Thanks a lot|Thank you very much|cool, thanks|Nice, thank you|Great|Nice!|cool|Well done|Good job|Perfect|ok|OK|wow"""),
        "Goodbye!": listed(
            "Bye|bye|Goodbye|goodbye|Bye!|See you|see you later|Good night|bye bye|See you soon|That is all"
        ),
    }
)
ELSE = listed("""Tell me a joke|tell me a story|What is the capital of {}?|Who is {}?|Where is {}?|Why is {} {}?|{}
{} {}|What is {}?|What does {} mean?|Do you like {}?|Tell me about {}|How do I get to {}?|Who invented {}?|I like {}
Is {} {}?|Translate {}|How old is {}?|Explain {} to me|What is the weather in {}?|Sing a song about {}|{} {} {}
Can you {} a {}?|What is the meaning of {}?|I am {}|When did {} end?|Which {} is the best?|My {} is {}|Are you {}?
the {} of {}|Why {}?|What is the color of {}?|Write a story about {} and {}|How is {} made?|Give me a {}|what is {}
What time is it?|How many people live in {}?|How many {} are in the {}?|How much {} is in {}?|Write a poem about {}""")
TOO_HARD = listed("""sqrt of {}|sqrt({})|the square root of {}|{} to the power of {}|{}^{}|{} ** {}|{} mod {}
{} % {}|{} squared|log of {}|the sine of {}|sin({})|the factorial of {}|{}!|{}|the greater of {} and {}
{} modulo {}|the root of {}""")
NOT_COUNTED = listed("""How many vowels are in {}?|How many letters are in {}?|How many letters does {} have?|Spell {}
How long is the word {}?|Reverse {}|How many words are in {}?|What letters are in {}?|Is {} prime?|Is {} even?""")
NO_RESULT = "The calculator gave no result."


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


def number(rng: random.Random, digits: int = 6) -> tuple[str, str]:
    """Return a random number in natural notation and in Python's notation."""
    size = min(digits, rng.choice((1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 5, 6)))
    value = str(rng.randrange(10 ** (size - 1) if size > 1 else 0, 10**size))
    if rng.random() < 0.08:
        small = rng.randrange(13)
        return NUMBERS[small], str(small)
    if rng.random() < 0.12:
        value = f"{value}.{rng.randrange(1, 10) if rng.random() < 0.6 else f'{rng.randrange(1, 100):02}'}"
    return (f"{float(value):,}" if "." in value else f"{int(value):,}") if rng.random() < 0.3 else value, value


def operation(rng: random.Random) -> tuple[str, str]:
    """Return a random operator in natural notation and in Python's notation."""
    symbol = rng.choice("++++---****//") if rng.random() < 0.95 else "//"
    return rng.choice(SPOKEN[symbol]), symbol


def formula(rng: random.Random) -> tuple[str, str]:
    """Return a random expression of two to four numbers in natural notation and in Python's notation."""
    count = rng.choice((2, 2, 2, 3, 3)) if rng.random() < 0.96 else 4
    parts = [number(rng, 6 if count == 2 else 4)]
    for _ in range(count - 1):
        parts += [operation(rng), number(rng, 6 if count == 2 else 4)]
    if rng.random() < 0.04:
        parts[0] = ("-" + parts[0][0], "-" + parts[0][1]) if parts[0][0][0].isdigit() else parts[0]
    if count == 3 and rng.random() < 0.5:
        first = rng.choice((0, 2))
        parts[first] = ("(" + parts[first][0], "(" + parts[first][1])
        parts[first + 2] = (parts[first + 2][0] + ")", parts[first + 2][1] + ")")
    if rng.random() < 0.02:
        parts = [("(", "("), *parts, (")", ")")]
    return "".join(spoken for spoken, _ in parts), "".join(written for _, written in parts)


def courteous(rng: random.Random, text: str) -> str:
    """Return a request with a random degree of politeness and capitalization."""
    text = rng.choice(POLITE).format(text[0].lower() + text[1:]) if rng.random() < 0.5 else text
    return text[0].upper() + text[1:] if rng.random() < 0.5 else text


def asked(rng: random.Random, spoken: str) -> str:
    """Return a question about a phrase."""
    text = rng.choice(ASKING).format(spoken)
    return courteous(rng, text) if rng.random() < 0.5 else text


def arithmetic(rng: random.Random) -> Turn:
    """Return a random question about numbers."""
    kind = rng.random()
    (a, x), (b, y) = number(rng), number(rng)
    if kind < 0.62:
        spoken, expression = formula(rng)
        question = asked(rng, spoken)
    elif kind < 0.66:
        symbol, spoken = rng.choice(SINGLE).split(":")
        question, expression = asked(rng, spoken.format(a)), x + symbol
    elif kind < 0.86:
        polite = rng.random() < 0.5
        symbol, spoken = rng.choice(DOING if polite else NAMING).split(":")
        question = courteous(rng, spoken.format(a=a, b=b)) if polite else asked(rng, spoken.format(a=a, b=b))
        expression = x + symbol + y
    else:
        (a, x), (b, y) = number(rng, 3), number(rng, 3)
        symbol, story = rng.choice(STORIES).split(":")
        question = story.format(a=a, b=b, n=rng.choice(NOUNS), p=rng.choice(PEOPLE))
        expression = x + symbol + y
    return Turn(question, expression, "The answer is {}.")


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


def small_talk(rng: random.Random) -> Turn:
    """Return a random turn without a tool call."""
    if rng.random() < 0.25:
        return Turn(asked(rng, rng.choice(TOO_HARD).format(number(rng)[0], number(rng, 2)[0])), "", HELP)
    if rng.random() < 0.5:
        things = [rng.choice((word(rng), number(rng)[0], rng.choice(WORDS + NOUNS + PEOPLE))) for _ in range(3)]
        return Turn(rng.choice(ELSE + NOT_COUNTED).format(*things), "", HELP)
    reply, questions = rng.choice(tuple(SMALL_TALK.items()))
    return Turn(rng.choice(questions), "", reply)


def follow_up(rng: random.Random, last: Turn) -> Turn:
    """Return a random question that refers to the last turn."""
    if ".count(" in last.expression:
        _, text, _, letter, _ = last.expression.split("'")
        if rng.random() < 0.5:
            letter = rng.choice(text.replace(" ", ""))
            return counted(rng.choice(OTHER_LETTER).format(letter), text, letter)
        text = word(rng)
        return counted(rng.choice(OTHER_WORD).format(text), text, letter)
    symbol, question = rng.choice(AFTER).split(":")
    spoken, written = number(rng, 3)
    return Turn(question.format(spoken), f"{result_text(last.expression)}{symbol}{written}", last.reply)


def trainable(turn: Turn) -> bool:
    """Return True if nothing in a turn is held out."""
    subject = turn.expression.split("'")[1] if "'" in turn.expression else turn.expression
    return not any(held_out_text(part) for part in subject.split())


def draw(rng: random.Random, last: Turn | None) -> Turn:
    """Return a random turn for training; it may refer to the last one."""
    result = result_text(last.expression) if last and last.expression else None
    while True:
        kinds: tuple[Callable[[random.Random], Turn], ...] = (arithmetic, letters, small_talk)
        chain = last is not None and result is not None and len(result) < 9 and rng.random() < 0.6
        turn = follow_up(rng, last) if chain and last else rng.choices(kinds, (50, 35, 15))[0](rng)
        if not turn.expression or trainable(turn):
            return turn


def conversation(rng: random.Random) -> list[Turn]:
    """Return one to four random turns for training."""
    turns: list[Turn] = []
    for _ in range(rng.choice((1, 1, 1, 1, 1, 2, 2, 3, 4))):
        turns.append(draw(rng, turns[-1] if turns else None))
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


def held_out(n: int, seed: int, kind: str = "both") -> list[tuple[str, str]]:
    """Return n held-out questions with their results; `kind` is "arithmetic", "letters" or "both"."""
    rng = random.Random(seed)
    found: list[tuple[str, str]] = []
    while len(found) < n:
        arithmetical = kind == "arithmetic" or (kind == "both" and len(found) % 2 == 0)
        turn = arithmetic(rng) if arithmetical else letters(rng)
        result = result_text(turn.expression)
        if result is not None and not trainable(turn):
            found.append((turn.question, result))
    return found


def is_right(reply_text: str, answer_text: str) -> bool:
    """Return True if the last number of a reply equals the answer, digit by digit."""
    numbers = re.findall(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?", reply_text)
    return bool(numbers) and numbers[-1] == answer_text
