"""Structured output: masks allow exactly what the grammar allows, also inside an engine."""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nano_inference import BadRequest, EngineConfig, InferenceEngine, SamplingParams, TrainingSample
from nano_inference.cli.place import tokenizer_source
from nano_inference.text.grammar import ENDED, MAX_CACHED, Grammar, Grammars
from nano_inference.text.grammar_text import MAX_BYTES, MAX_CHOICES
from nano_inference.text.kinds import TokenizerSource
from nano_inference.text.stops import bad_words_matcher, both, stop_matcher
from nano_inference.text.tokenizer import Tokenizer, load_tokenizer
from nano_inference.types import Matcher
from tests.server.tiny import make_tiny

pytest.importorskip("llguidance")

pytestmark = pytest.mark.slow

TINY_VOCAB, TINY_EOS = 260, 257
PADDED = 7
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["alpha", "beta"]}, "size": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["kind", "size"],
    "additionalProperties": False,
}


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a token for each byte and four special tokens."""
    return make_tiny(tmp_path_factory.mktemp("grammar"))


@pytest.fixture(scope="session")
def tiny(tiny_dir: Path) -> Tokenizer:
    return load_tokenizer(TokenizerSource(str(tiny_dir)))


@pytest.fixture(scope="session")
def grammars(tiny: Tokenizer) -> Grammars:
    return Grammars(tiny, TINY_VOCAB, [TINY_EOS])


@pytest.fixture(scope="session")
def large(default_model_path: Path) -> Tokenizer:
    return load_tokenizer(tokenizer_source(default_model_path))


@pytest.fixture(scope="session")
def large_grammars(large: Tokenizer) -> Grammars:
    return Grammars(large, large.vocab_size + PADDED, large.eos_ids)


def ids_of(mask: bytes | None) -> list[int]:
    """Return the ids that a mask allows, ascending."""
    assert mask is not None
    bits = int.from_bytes(mask, "little")
    found = []
    while bits:
        low = bits & -bits
        found.append(low.bit_length() - 1)
        bits ^= low
    return found


def pick(rng: random.Random, mask: bytes, closing: frozenset[int]) -> int:
    """Choose an allowed token: often one that closes something, else any, without decoding all of a large mask."""
    if rng.random() < 0.4:
        closers = [token for token in closing if mask[token >> 3] >> (token & 7) & 1]
        if closers:
            return rng.choice(closers)
    for _ in range(20):
        token = rng.randrange(8 * len(mask))
        if mask[token >> 3] >> (token & 7) & 1:
            return token
    return rng.choice(ids_of(mask))


def walk(matcher: Matcher, rng: random.Random, closing: frozenset[int], limit: int = 600) -> list[int] | None:
    """Generate one random sample with the masks; None if it did not end within `limit` tokens."""
    tokens: list[int] = []
    for _ in range(limit):
        token = pick(rng, matcher.mask() or b"", closing)
        if matcher.advance(token) is not None:
            return tokens
        tokens.append(token)
    return None


def text_of(tokenizer: Tokenizer, tokens: list[int]) -> str:
    return b"".join(map(tokenizer.token_bytes, tokens)).decode()


def closing_of(tokenizer: Tokenizer) -> frozenset[int]:
    return frozenset(tokenizer.eos_ids) | {
        tokenizer.encode(text, add_special=False, parse_special=False)[0] for text in '"}]'
    }


def is_json_object(text: str) -> bool:
    return isinstance(json.loads(text), dict)


ARITHMETIC = 'root ::= sum\nsum ::= term ("+" term){0,3}\nterm ::= [0-9]{1,2} | "(" sum ")"'
KINDS: list[tuple[Grammar, Callable[[str], object]]] = [
    (Grammar("json_schema", json.dumps(SCHEMA)), lambda text: jsonschema_rs.is_valid(SCHEMA, json.loads(text))),
    (Grammar("json_object", ""), is_json_object),
    (Grammar("regex", "([0-7]{3}-){2}[a-zé]{1,4}"), lambda text: re.fullmatch("([0-7]{3}-){2}[a-zé]{1,4}", text)),
    (Grammar("regex", "^ab?$"), lambda text: text in ("a", "ab")),
    (
        Grammar("choice", '["yes", "n\\no", "(a|b)*/\\\\", "日本"]'),
        lambda text: text in ("yes", "n\no", "(a|b)*/\\", "日本"),
    ),
    (
        Grammar("lark", 'start: WORD ("," WORD){2}\nWORD: /[a-c]+/'),
        lambda text: re.fullmatch("[a-c]+(,[a-c]+){2}", text),
    ),
    (Grammar("gbnf", ARITHMETIC), lambda text: isinstance(eval(re.sub(r"\b0+(?=\d)", "", text), {}), int)),
    (
        Grammar("gbnf", r'root ::= "\u0041\u00e9\n" [\u005B-\u005D"]{2} "\\u0041"'),
        lambda text: re.fullmatch(r'Aé\n[\[\\\]"]{2}\\u0041', text),
    ),
]


@pytest.mark.parametrize(("grammar", "is_right"), KINDS, ids=[grammar.kind for grammar, _ in KINDS])
def test_every_kind_over_bytes(
    tiny: Tokenizer, grammars: Grammars, grammar: Grammar, is_right: Callable[[str], object]
) -> None:
    make = grammars.matcher(grammar)
    written = set()
    for seed in range(30):
        tokens = walk(make(), random.Random(seed), closing_of(tiny))
        assert tokens is not None and is_right(text_of(tiny, tokens)), text_of(tiny, tokens or [])
        written.add(tuple(tokens))
    assert len(written) > 1, "samples differ"


def test_sentencepiece_vocabulary_writes_no_leading_space(llama_dir: Path) -> None:
    tokenizer = load_tokenizer(TokenizerSource(str(llama_dir)))
    make = Grammars(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids).matcher(Grammar("choice", '["hello world"]'))
    for seed in range(10):
        tokens = walk(make(), random.Random(seed), frozenset())
        assert tokens is not None and text_of(tokenizer, tokens) == "hello world"


@pytest.mark.model
def test_forced_text_has_the_tokenization_of_the_tokenizer(large: Tokenizer, large_grammars: Grammars) -> None:
    text = "The quick brown fox jumps over the lazy dog; 12345 naïve. " * 40
    matcher = large_grammars.matcher(Grammar("choice", json.dumps([text])))()
    expected = large.encode(text, add_special=False, parse_special=False)
    for token in expected[:-2]:
        assert ids_of(matcher.mask()) == [token]
        assert matcher.advance(token) is None


@pytest.mark.parametrize("eos_ids", [[TINY_EOS], [TINY_EOS, 256], [TINY_EOS, TINY_VOCAB + 90]])
def test_end_token_is_allowed_exactly_where_the_grammar_is_satisfied(tiny: Tokenizer, eos_ids: list[int]) -> None:
    vocab_size = TINY_VOCAB + PADDED
    make = Grammars(tiny, vocab_size, eos_ids).matcher(Grammar("regex", "ab?(cd)?"))
    ends = [token for token in eos_ids if token < vocab_size]
    letters = {char: tiny.encode(char, add_special=False, parse_special=False)[0] for char in "abcd"}
    for word, follow in (("", "a"), ("a", "bc"), ("ab", "c"), ("ac", "d"), ("abcd", ""), ("acd", "")):
        matcher = make()
        for char in word:
            assert matcher.advance(letters[char]) is None
        mask = matcher.mask()
        assert mask is not None and len(mask) == -(-vocab_size // 8)
        is_whole = re.fullmatch("ab?(cd)?", word) is not None
        assert ids_of(mask) == sorted([letters[char] for char in follow] + (ends if is_whole else []))
        if is_whole:
            assert matcher.advance(ends[-1]) == ends[-1]


def test_model_without_end_tokens_stops_at_the_end_of_the_grammar(tiny: Tokenizer) -> None:
    make = Grammars(tiny, TINY_VOCAB, []).matcher(Grammar("regex", "ab?c"))
    matcher = make()
    assert [matcher.advance(tiny.encode(char, add_special=False)[0]) for char in "abc"] == [None, None, ENDED]


def test_special_tokens_are_not_text(tiny: Tokenizer, grammars: Grammars) -> None:
    for grammar in (Grammar("regex", "(?s:.)*"), Grammar("regex", r"(<\|im_start\|>|<\|bos\|>)")):
        assert not set(ids_of(grammars.matcher(grammar)().mask())) & (tiny.special_ids - {TINY_EOS})
    tokens = walk(grammars.matcher(Grammar("choice", '["<|bos|>"]'))(), random.Random(0), frozenset())
    assert tokens is not None and text_of(tiny, tokens) == "<|bos|>" and len(tokens) == 7
    for name in ("<|bos|>", "<[258]>", "<|im_end|>"):
        with pytest.raises(BadRequest, match=r"lark: .*special tokens cannot be written"):
            grammars.matcher(Grammar("lark", f'start: "<a>" {name} // <b>'))
    assert grammars.matcher(Grammar("lark", 'start: "<a>" /<b>/ // <c>'))


def test_whitespace_is_limited(tiny: Tokenizer, grammars: Grammars) -> None:
    spaces = [tiny.encode(char, add_special=False)[0] for char in "\n \t"]
    (brace,) = tiny.encode("}", add_special=False)
    matcher = grammars.matcher(Grammar("json_schema", json.dumps(SCHEMA)))()
    written: list[int] = []
    while True:
        allowed = set(ids_of(matcher.mask()))
        token = next((t for t in (*spaces, brace) if t in allowed), min(allowed))
        if matcher.advance(token) is not None:
            break
        written.append(token)
        assert len(written) < 400
    text = text_of(tiny, written)
    assert jsonschema_rs.is_valid(SCHEMA, json.loads(text)) and 50 < sum(char in " \n\t" for char in text) < 300


def nested(depth: int) -> str:
    return '{"items":' * depth + "{}" + "}" * depth


REFUSED = [
    (Grammar("json_schema", "{"), "json_schema: is not valid JSON"),
    (Grammar("json_schema", '{"const": NaN}'), "json_schema: is not valid JSON: NaN is not a JSON number"),
    (Grammar("json_schema", "[]"), "json_schema: must be an object"),
    (Grammar("json_schema", '{"not": {"type": "string"}}'), "json_schema: not is not supported"),
    (Grammar("json_schema", '{"type": "stuff"}'), "json_schema: Invalid type: stuff"),
    (Grammar("lark", 'start: %json {"uniqueItems": true}'), "uniqueItems is not supported"),
    (Grammar("json_schema", '{"$ref": "#"}'), "json_schema: no text satisfies it"),
    (Grammar("json_schema", nested(5000)), "json_schema: nested too deep"),
    (Grammar("json_schema", json.dumps({"enum": ["x" * 9] * 10**5})), "json_schema: 1300010 bytes are more than 65536"),
    (Grammar("json_schema", '{"allOf": [{"multipleOf": 79}, {"multipleOf": 0.83}]}'), "common multiple above 1000"),
    (Grammar("regex", "a(?=b)"), "regex: look-around, including"),
    (Grammar("regex", "a" * (MAX_BYTES["regex"] + 1)), "regex: 8193 bytes are more than 8192"),
    (Grammar("regex", "\ud800"), "regex: contains half of a surrogate pair"),
    (Grammar("choice", "[]"), "choice: must be a list of strings"),
    (Grammar("choice", json.dumps(["a"] * (MAX_CHOICES + 1))), "choice: 10001 alternatives are more than 10000"),
    (Grammar("lark", "start: x"), 'lark: at 1.8.: unknown name: "x"'),
    (Grammar("lark", ' {"grammars": []}'), "lark: a grammar begins with"),
    (Grammar("lark", "start: T0\n" + "".join(f"T{i}: T{i + 1} T{i + 1}\n" for i in range(40)) + 'T40: "z"'), "too big"),
    (Grammar("gbnf", "root ::= " + "(" * 15_000 + '"a"' + ")" * 15_000), "gbnf: nested too deep"),
    (Grammar("gbnf", 'rot ::= "a"'), "gbnf: No 'root' rule found"),
]


def string(**keywords: Any) -> dict[str, Any]:
    return {"type": "string", **keywords}


def record(names: Any, **keywords: Any) -> dict[str, Any]:
    return {"type": "object", "propertyNames": names, "additionalProperties": {"type": "number"}, **keywords}


DURATION = r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?)$"
"""As zod 4.6 writes it."""
NEUTRAL = {"uniqueItems": False, "minContains": 1, "dependentRequired": {}, "then": False, "propertyNames": {}}
ACCEPTED: list[tuple[dict[str, Any], tuple[Any, ...], tuple[Any, ...]]] = [
    (string(format="nope"), ("a",), (1,)),
    (string(format="starts_with", pattern="^ab.*"), ("abc",), ("b",)),
    (string(format="ends_with", allOf=[{"pattern": "^a.*"}, {"pattern": ".*b$"}]), ("ab",), ("a",)),
    (string(format="duration", pattern=DURATION), ("P1D",), ("1D",)),
    (string(format="date"), ("2026-01-31",), ("x",)),
    (record({"type": "string"}), ({"x": 1},), ({"x": "y"},)),
    (
        record({"type": "string", "enum": ["a", "b"]}, required=["a"]),
        ({"a": 1}, {"a": 1, "b": 2}),
        ({}, {"a": 1, "c": 1}),
    ),
    (record({"$comment": "!", "const": "a"}), ({}, {"a": 1}), ({"b": 1},)),
    (record({"type": "string", "pattern": "^x_[0-9]$"}), ({"x_1": 1},), ({"y": 1},)),
    ({"type": "array", "items": {"type": "integer"}, **NEUTRAL}, ([], [1, 1]), (["a"],)),
    ({"type": "array", "items": {"not": {}}}, ([],), ([1],)),
    ({"type": "array", "contains": {"const": 1}, "minContains": 0}, ([], [2]), (1,)),
    ({"properties": {"format": {"const": 1}, "then": {}}, "required": ["format"]}, ({"format": 1},), ({"format": 2},)),
    ({"enum": [{"format": "x", "uniqueItems": False}]}, ({"format": "x", "uniqueItems": False},), ({},)),
]
"""Schemas, values that they allow, and values that they do not."""


@pytest.mark.parametrize(("schema", "good", "bad"), ACCEPTED, ids=range(len(ACCEPTED)))
def test_keywords_that_say_nothing_are_accepted(
    grammars: Grammars, tiny: Tokenizer, schema: dict[str, Any], good: tuple[Any, ...], bad: tuple[Any, ...]
) -> None:
    def allows(grammar: Grammar, value: Any) -> bool:
        matcher = grammars.matcher(grammar)()
        for token in tiny.encode(json.dumps(value), add_special=False, parse_special=False):
            if token not in ids_of(matcher.mask()):
                return False
            matcher.advance(token)
        return TINY_EOS in ids_of(matcher.mask())

    whole = Grammar("json_schema", json.dumps(schema))
    inline = Grammar("lark", f"%llguidance {{}}\nstart: answer\nanswer: %json {json.dumps(schema)}\n")
    validator = jsonschema_rs.validator_for(schema, validate_formats=True)
    for value in (*good, *bad):
        wanted = any(value is one for one in good)
        assert validator.is_valid(value) == wanted
        assert allows(whole, value) == allows(inline, value) == wanted, value


@pytest.mark.parametrize(("grammar", "message"), REFUSED, ids=range(len(REFUSED)))
def test_refused_grammars(
    grammars: Grammars, capfd: pytest.CaptureFixture[str], grammar: Grammar, message: str
) -> None:
    with pytest.raises(BadRequest, match=message) as caught:
        grammars.matcher(grammar)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    assert capfd.readouterr() == ("", "")


def test_long_chains_of_references_compile(grammars: Grammars) -> None:
    """The compiler recurses along references; with a thread's default stack size these would end the process."""
    rule = f'r%d: {"(" * 12}"a" r%d{")" * 12} | "b"\n'
    lark = "start: r0\n" + "".join(rule % (i, i + 1) for i in range(650)) + 'r650: "z"\n'
    refs = {f"{i}": {"items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(1350)} | {"1350": {}}
    for grammar in (
        Grammar("lark", lark),
        Grammar("json_schema", json.dumps({"$defs": refs, "$ref": "#/$defs/0"})),
    ):
        assert MAX_BYTES[grammar.kind] * 0.7 < len(grammar.text)
        assert ids_of(grammars.matcher(grammar)().mask())


def test_compiled_grammars_are_cached(tiny: Tokenizer) -> None:
    ours = Grammars(tiny, TINY_VOCAB, [TINY_EOS])
    grammars = [Grammar("regex", f"a{{{number}}}") for number in range(1, MAX_CACHED + 3)]
    for grammar in grammars[:MAX_CACHED]:
        assert ours.known(grammar) is None
        ours.matcher(grammar)
    ours.matcher(grammars[0])
    for grammar in grammars[MAX_CACHED:]:
        ours.matcher(grammar)
    assert [grammar for grammar in grammars if ours.known(grammar) is None] == grammars[1:3], "the least recently used"
    with pytest.raises(BadRequest):
        ours.matcher(Grammar("regex", "("))
    assert ours.known(Grammar("regex", "(")) is None


def test_without_the_extra(tiny: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(BadRequest, match=r"needs the extra 'grammar': pip install 'nano-inference\[grammar\]'"):
        Grammars(tiny, TINY_VOCAB, [TINY_EOS]).matcher(Grammar("regex", "a"))


AMBIGUOUS = Grammar("lark", 'start: a "!"\na: a a | a a a | /[a-z]/')
"""Every token lengthens a row of the parser, whose time is quadratic in that length."""


# ---- random schemas ------------------------------------------------------------------------------------------------

NAMES = ["a", "b c", "é", "node", "x-y"]
PATTERNS = ["^[a-z]{2,5}$", "[0-9]", "^(ab|cd)*$", r"^\d{3}-\w+$", "x"]
FORMATS = ["date-time", "date", "time", "email", "ipv4", "ipv6", "uuid", "uri", "hostname", "duration"]
FORMAT_LIMITS = {"email": {"maxLength": 60}, "hostname": {"maxLength": 60}}
"""The validator limits the part before the @ to 64 characters (RFC 5321, 4.5.3.1.1) and a host's label to 63 (RFC 1035,
2.3.4); the grammar's formats have no such limits."""
values = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.sampled_from(["", "a", 'q"\\', "日本", 0.5, -1.25]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=2),
    max_leaves=4,
)


@st.composite
def bounds(draw: st.DrawFn, low: str, high: str, top: int) -> dict[str, int]:
    """Draw a lower bound, an upper bound, both or none."""
    first = draw(st.integers(0, top))
    out = {low: first} if draw(st.booleans()) else {}
    return out | ({high: first + draw(st.integers(0, top))} if draw(st.booleans()) else {})


@st.composite
def strings(draw: st.DrawFn) -> dict[str, Any]:
    extra = draw(st.sampled_from(["length", "pattern", "format", "none"]))
    if extra == "pattern":
        return {"type": "string", "pattern": draw(st.sampled_from(PATTERNS))}
    if extra == "format":
        name = draw(st.sampled_from(FORMATS))
        return {"type": "string", "format": name, **FORMAT_LIMITS.get(name, {})}
    return {"type": "string"} | (draw(bounds("minLength", "maxLength", 6)) if extra == "length" else {})


@st.composite
def numbers(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from(["integer", "number"]))
    low = draw(st.integers(-300, 300)) / (1 if kind == "integer" else 4)
    names = draw(st.sampled_from([("minimum", "maximum"), ("exclusiveMinimum", "exclusiveMaximum"), ()]))
    limits = dict(zip(names, (low, low + draw(st.integers(2, 200))), strict=False))
    multiple = {"multipleOf": draw(st.sampled_from([2, 5, 7]))} if kind == "integer" and draw(st.booleans()) else {}
    if multiple and limits:  # so that the range contains a multiple
        limits[names[1]] = low + 50
    return {"type": kind, **{k: int(v) if kind == "integer" else v for k, v in limits.items()}, **multiple}


def compounds(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    @st.composite
    def objects(draw: st.DrawFn) -> dict[str, Any]:
        properties = draw(st.dictionaries(st.sampled_from(NAMES), inner, max_size=4))
        required = [name for name in properties if draw(st.booleans())]
        more = draw(st.sampled_from([False, None, "schema"]))
        rest = {} if more is None else {"additionalProperties": draw(inner) if more == "schema" else False}
        return {"type": "object", "properties": properties, "required": required, **rest}

    @st.composite
    def arrays(draw: st.DrawFn) -> dict[str, Any]:
        prefix = {"prefixItems": draw(st.lists(inner, min_size=1, max_size=2))} if draw(st.booleans()) else {}
        return {"type": "array", "items": draw(inner), **draw(bounds("minItems", "maxItems", 3)), **prefix}

    return objects() | arrays() | st.lists(inner, min_size=1, max_size=3).map(lambda some: {"anyOf": some})


leaves = (
    strings()
    | numbers()
    | st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": ["string", "null"]}, {"$ref": "#/$defs/node"}])
    | st.lists(values, min_size=1, max_size=4).map(lambda some: {"enum": some})
    | values.map(lambda value: {"const": value})
)
schemas = st.recursive(leaves, compounds, max_leaves=8)
NODE = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
    "required": ["v"],
    "additionalProperties": False,
}


def finite(text: str) -> float:
    """Return the nearest finite float64: JSON's exponents are unlimited, and the validator rejects infinity."""
    return max(-sys.float_info.max, min(float(text), sys.float_info.max))


def check_schemas(tokenizer: Tokenizer, grammars: Grammars, count: int) -> dict[str, int]:
    """Generate and validate samples of random schemas; return the numbers of valid, refused and too long ones."""
    seen = {"valid": 0, "refused": 0, "unended": 0}
    closing = closing_of(tokenizer)

    @settings(
        max_examples=count, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(schemas, st.integers(0, 2**31))
    def check(schema: dict[str, Any], seed: int) -> None:
        whole = {"$defs": {"node": NODE}, **schema}
        try:
            make = grammars.matcher(Grammar("json_schema", json.dumps(whole)))
        except BadRequest as error:
            assert re.match("json_schema: Unsatisfiable|json_schema: no text", str(error)), (error, whole)
            seen["refused"] += 1
            return
        tokens = walk(make(), random.Random(seed), closing)
        if tokens is None:
            seen["unended"] += 1
            return
        validator = jsonschema_rs.validator_for(whole, validate_formats=True)
        text = text_of(tokenizer, tokens)
        known = re.sub(r"(?<=\d):60", ":59", text)  # the validator does not support the leap seconds of RFC 3339
        assert validator.is_valid(json.loads(known, parse_float=finite)), (text, whole)
        seen["valid"] += 1

    check()
    return seen


@pytest.mark.parametrize("count", [150, pytest.param(2000, marks=pytest.mark.nightly)])
def test_random_schemas_over_bytes(tiny: Tokenizer, grammars: Grammars, count: int) -> None:
    seen = check_schemas(tiny, grammars, count)
    assert seen["refused"] <= count // 20 and seen["unended"] <= count // 50, seen


@pytest.mark.model
def test_random_schemas_over_a_large_vocabulary(large: Tokenizer, large_grammars: Grammars) -> None:
    seen = check_schemas(large, large_grammars, 60)
    assert seen["refused"] <= 3 and seen["unended"] <= 3, seen


# ---- in an engine --------------------------------------------------------------------------------------------------

PROMPT = [5, 9, 30, 2, 44]
PARAMS = SamplingParams(max_tokens=120, seed=4, raw_logprobs=True, sampling_mask=True, logprobs=2)
AS_SCHEMA = Grammar("json_schema", json.dumps(SCHEMA))


@pytest.fixture(scope="module")
def open_tiny(tiny_dir: Path) -> Callable[..., InferenceEngine]:
    def make(**options: Any) -> InferenceEngine:
        options = {"kv_cache_bytes": 8 << 20, "device": "cpu", "num_threads": 1, "block_size": 4} | options
        return InferenceEngine(EngineConfig(model_path=str(tiny_dir), **options))

    return make


def generate(engine: InferenceEngine, params: SamplingParams, count: int = 1, **options: Any) -> list[TrainingSample]:
    """Run one request to its end and return its samples in order."""
    engine.add_request(PROMPT, params, count, **options)
    samples: list[TrainingSample] = []
    while engine.has_pending():
        samples += engine.step()
    return sorted(samples, key=lambda sample: sample.sample_index)


def columns(sample: TrainingSample) -> tuple[Any, ...]:
    return sample.completion_tokens, sample.mask, sample.finish_reason, sample.stop_reason


def check_forced(sample: TrainingSample, make: Callable[[], Matcher]) -> int:
    """Check that every token was allowed, and is marked as forced exactly if it was the only one; count those."""
    assert sample.raw_logprobs and sample.sampling_masks and sample.top_logprobs
    matcher, num_forced = make(), 0
    for place, token in enumerate(sample.completion_tokens):
        allowed = ids_of(matcher.mask())
        assert token in allowed
        found = (sample.mask[place], sample.sampling_masks[place], sample.top_logprobs[place])
        if len(allowed) == 1:
            num_forced += 1
            assert found == (0, (), ())
            assert sample.logprobs[place] == sample.raw_logprobs[place] == 0.0
        else:
            assert found[:2] == (1, tuple(allowed)) and found[2]
            assert sample.raw_logprobs[place] < 0.0
        matcher.advance(token)
    return num_forced


@pytest.mark.parametrize("mode", ["raw", "processed", "tempered"])
def test_tokens_without_an_alternative_are_forced(
    open_tiny: Callable[..., InferenceEngine], tiny: Tokenizer, grammars: Grammars, mode: Any
) -> None:
    make = grammars.matcher(AS_SCHEMA)
    samples = generate(open_tiny(), replace(PARAMS, logprobs_mode=mode, temperature=0.8), 4, make_matcher=make)
    assert len({sample.completion_tokens for sample in samples}) > 1
    for sample in samples:
        assert check_forced(sample, make) >= 10
        assert (sample.finish_reason, sample.stop_reason) == ("stop", None)
        assert sample.completion_tokens[-1] == TINY_EOS
        assert jsonschema_rs.is_valid(SCHEMA, json.loads(text_of(tiny, list(sample.completion_tokens[:-1]))))


def test_stop_strings_and_bad_words_with_a_grammar(
    open_tiny: Callable[..., InferenceEngine], tiny: Tokenizer, grammars: Grammars
) -> None:
    engine, make = open_tiny(), grammars.matcher(Grammar("regex", "[a-c]{20}"))
    params = SamplingParams(max_tokens=30, seed=3)
    (plain,) = generate(engine, params, make_matcher=make)
    assert "b" in tiny.decode(plain.completion_tokens)
    (kept,) = generate(engine, params, make_matcher=both(make, bad_words_matcher(tiny, ["b"], TINY_VOCAB)))
    assert re.fullmatch("[ac]{20}", tiny.decode(kept.completion_tokens))
    (stopped,) = generate(engine, params, make_matcher=both(make, stop_matcher(tiny, ("b",))))
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", "b")
    nothing = both(grammars.matcher(Grammar("regex", "ab")), bad_words_matcher(tiny, ["b"], TINY_VOCAB))
    (stuck,) = generate(engine, params, make_matcher=nothing)
    assert stuck.finish_reason == "abort" and "no token can be drawn" in str(stuck.stop_reason)


def test_too_ambiguous_grammar_aborts_only_its_sample(
    open_tiny: Callable[..., InferenceEngine], tiny: Tokenizer, grammars: Grammars
) -> None:
    engine = open_tiny()
    params = SamplingParams(max_tokens=200, seed=1, ignore_eos=True)
    (expected,) = generate(engine, params)
    (mark,) = tiny.encode("!", add_special=False)
    without = replace(params, logit_bias={mark: -1000.0})
    other = engine.add_request(PROMPT, params)
    broken = engine.add_request(PROMPT, without, make_matcher=grammars.matcher(AMBIGUOUS))
    found: dict[int, TrainingSample] = {}
    while engine.has_pending():
        found |= {sample.request_id: sample for sample in engine.step()}
    assert found[broken].finish_reason == "abort"
    assert str(found[broken].stop_reason).startswith("ValueError: grammar: ")
    assert columns(found[other]) == columns(expected)
