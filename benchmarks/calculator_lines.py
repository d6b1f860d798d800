"""Questions and chats for the packaged model that its training data does not generate.

A question is written as "expression:text"; the letters in braces are numbers, {s} is the square of {a}, {t} has eight
to ten digits, and {u}, {v} are {a}, {b} in words.
"""

from __future__ import annotations

import random

from calculator_data import result_text
from calculator_numbers import in_words
from calculator_talk import listed

PATTERNS = {
    "questions in other words": listed("""{a}+{b}:If I put {a} and {b} into one pot, what number is in it?
{a}*{b}:{a} rows of {b}, how much is it?|{a}+{b}:Could you kindly work out for me what {a} plus {b} comes to?
{a}-{b}:Remove {b} from {a}, what remains?|{a}*{b}:I would be grateful to learn the product {a} times {b}
{a}+{b}:sum up these two for me: {a}, {b}|{a}/{b}:How often does {b} go into {a}?
{a}-{b}:By how much is {a} bigger than {b}?|{a}*{b}:{a} multiplied with {b} gives?
{a}+{b}:My homework says {a} + {b}, and I have no idea|{a}+{b}:hey there calculator whats {u} plus {v} mate
{a}-{b}:Deduct {b} from {a}|{a}*{b}:Tell my sister the value of {a} * {b}, would you
{a}+{b}:{u} and then {v} on top, total?|{a}/{b}:Please be so kind and divide {a} by {b} for my little brother"""),
    "stories in other words": listed(
        """{a}+{b}:Zelda owns {a} violins. Her uncle brings {b} further violins. How many has Zelda now?
{a}-{b}:A farmer kept {a} llamas. In winter {b} ran away. How many llamas are on the farm now?
{a}*{b}:Every carriage of the train seats {b} passengers. The train has {a} carriages. How many passengers fit?
{a}*{b}:Rashid types {b} words a minute. How many words does he type in {a} minutes?
{a}/{b}:We poured {a} liters of juice equally into {b} jugs. How many liters are in one jug?
{a}-{b}:The library owns {a} comics, {b} of which are borrowed. How many can I see on the shelf?
{a}+{b}:Yesterday Priya jogged {a} laps and today {b} laps. What is her total?
{a}-{b}:A rope of {a} inches loses {b} inches. How long is it now?
{a}*{b}:A gardener plants {a} beds with {b} tulips in every bed. Count all tulips.
{a}+{b}:At noon the hall held {a} guests, and {b} guests came later. How many guests is that?
({a}+{b})*{c}:Each of {c} lunches has {a} grapes and {b} figs. How many pieces of fruit is that altogether?
{a}-{b}-{c}:From a pile of {a} bricks the mason uses {b} in spring and {c} in autumn. What is left of the pile?
{a}*{b}+{c}:Wanda fills {a} albums with {b} pictures each and keeps {c} loose. How many pictures has she?
({a}+{b})/{c}:Two farmers harvest {a} and {b} melons and load them evenly on {c} carts. Melons per cart?"""
    ),
    "eight to ten digits": listed("""{t}+{a}:What is {t} + {a}?|{t}-{a}:{t} minus {a}|{t}*{b}:Multiply {t} by {b}
{t}/2:half of {t}|{a}+{t}:add {a} and {t}|{b}*{t}:{b} * {t}"""),
    "three steps in words": listed("""({a}+{b})*{c}-{d}:add {a} and {b}, then multiply by {c}, then subtract {d}
{a}-{b}+{c}-{d}:start with {a}, subtract {b}, add {c} and subtract {d}
({a}+{b})*2+{c}:double the sum of {a} and {b} and add {c}
({a}*{b}+{c})/{d}:Multiply {a} by {b}, then add {c}, then divide by {d}
({a}+{b}+{c})*{d}:{a} plus {b} plus {c}, all times {d}"""),
    "powers and roots": listed("""{s}:What is {a} squared?|{a}:the square root of {s}|{a}*{s}:{a} cubed
{s}:{a} to the power of 2|{s}:{a}^2|{a}:sqrt({s})"""),
    "units": listed("""{a}*60:How many minutes are {a} hours?|{a}*7:How many days are in {a} weeks?
{a}*100:How many centimeters are {a} meters?|{a}*12:how many months are {a} years?
{a}*1000:convert {a} kg to grams"""),
    "dates and clocks": listed("""{b}-5:How many days is it from June 5 to June {b}?
60-{c}:How many minutes from 3:{c} to 4 o'clock?|24-{c}:It is {c} o'clock. How many hours until midnight?
2026-19{c}:I was born in 19{c}. How old am I in 2026?"""),
    "digit by digit": listed(
        """{e}{c}+{d}:{x} {y} plus {d}|{e}{c}*{d}:multiply {x} {y} by {d}|{e}{c}-{d}:{x} {y} minus {d}"""
    ),
    "fractions and Roman numerals": listed("""2/3*{a}:two thirds of {a}|3/4*{a}:What is three quarters of {a}?
{a}+12:{a} plus XII|{a}*4:{a} times IV|{a}+1/2:{a} plus one half|{a}*5/8:five eighths of {a}"""),
    "other languages": listed("""{a}+{b}:Was ist {a} plus {b}?|{a}*{b}:Wie viel ist {a} mal {b}?
{a}+{b}:¿Cuánto es {a} más {b}?|{a}-{b}:Combien font {a} moins {b} ?|{a}+{b}:Quanto fa {a} più {b}?
{a}/{b}:Teile {a} durch {b}|{a}*{b}:{a} fois {b}"""),
    "typing errors": listed("""{a}+{b}:waht is {a} pluss {b}|{a}*{b}:mutliply {a} by {b}
{a}-{b}:substract {b} form {a}|{a}+{b}:ad {a} an {b}|{a}/{b}:devide {a} by {b}|{a}*{b}:wht is {a} tims {b}"""),
}
CHATS = listed("""Hello!:hey hey, good to be here|Hello!:Hi, I just installed you
Hello!:hello my dear little calculator|I am fine:hi! how are you doing this morning?
I am fine:are you feeling good today?|I calculate:I don't know how to use you
I calculate:what are the things that you can do|I calculate:please tell me how you can be of use
I calculate:what is your purpose?|I am a very:so what exactly are you?|I am a very:tell me your name please
I am a very:am I speaking with a language model?|No, I am only:do you have a brain?
No, I am only:are you a living being?|No, I am only:do you ever feel sad?
A short script:who is the person that made you?|A short script:how did they train you?
A short script:who is behind this model?|I have about:how many parameters are in you?
I have about:are you a large model or a small one?|I write an:how do you work out the results?
I write an:what do you use to calculate?|I write an:do you compute this on your own?
You are welcome!:thank you, that was great|You are welcome!:thanks a million
You are welcome!:wonderful, thank you very much|I am glad that it:you are amazing
I am glad that it:nice work, little one|I am glad that it:wow, that is really cool
I may be wrong:I think your answer is wrong|I may be wrong:that can't be right, check again
I may be wrong:you got that wrong|Good. What:I have a question for you|Good. What:may I ask you something else?
Good. What:yes, let us continue|All right.:no, I need nothing more|All right.:wait, let me think about it
All right.:not at the moment, thanks|Goodbye!:ok bye, see you tomorrow|Goodbye!:I have to leave now, bye
Goodbye!:good night and sleep well|Nice to meet you, Stefan!:Hello, my name is Stefan|Nice to meet you, Ruth!:I am Ruth
Nice to meet you, Amir!:hi, I'm Amir|I am sorry:I am very sad today|I am sorry:I feel a bit lonely
I am sorry:my grandmother died|I am sorry:today is a terrible day|I am glad that you:I am so happy today
I am glad that you:I feel great this morning|Why was six:could you tell me a good joke?
Why was six:please make me laugh a bit|Parallel:ok, and another joke?|Parallel:tell me one more joke please
I like seven:which number do you like the most?|I like seven:what's the number you like best?
I have no taste:do you like ice cream?|I have no taste:what is your favorite dish?
I have no taste:do you prefer tea or beer?|I know nothing:What is the capital of Hungary?
I know nothing:where exactly is Belgium?|I know nothing:how many people live in Denmark?
I know nothing:who was Isaac Newton?|I know nothing:tell me something about Julius Caesar
I know nothing:when was Albert Einstein born?|I do not know:why is the grass green?|I do not know:what is a democracy?
I do not know:how do airplanes fly?|I do not know:explain how a clock works|I have no clock:what is the time in London?
I have no clock:is it going to rain tomorrow?|I have no clock:which day of the week is today?
I cannot write:write me a nice poem about spring|I cannot write:could you write a letter to my boss?
I cannot write:sing something for me|I cannot translate:translate good morning into German
I cannot translate:can you speak Swedish?|I cannot translate:say that in French
I cannot program:write a Python program that sorts numbers|I cannot program:can you fix this bug in my code?
I cannot program:please turn off the lights""")
"""Lines written for this test, each with the beginning of a fitting reply."""


def asked(n: int, seed: int, patterns: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return n questions of the patterns, in turn, and their results, with random numbers of up to three digits."""
    rng = random.Random(seed)
    found = []
    for place in range(n):
        a, b, c, d, e = (rng.randrange(2, 10 ** rng.choice((1, 2, 2, 3))) for _ in range(5))
        c, d, e = c % 50 + 10, d % 9 + 2, e % 7 + 2
        names = {"a": a, "b": b, "c": c, "d": d, "e": e, "s": a * a, "t": rng.randrange(10**7, 10**10)}
        spoken = {"u": in_words(a), "v": in_words(b), "x": in_words(e), "y": " ".join(in_words(int(i)) for i in str(c))}
        expression, text = patterns[place % len(patterns)].split(":", 1)
        result = result_text(expression.format(**names, **spoken))
        assert result is not None
        found.append((text.format(**names, **spoken), result))
    return found
