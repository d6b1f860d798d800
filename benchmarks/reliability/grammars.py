"""What a hard grammar costs its neighbours: a plain stream beside each one, while it compiles and while it is sampled.

    python benchmarks/reliability/grammars.py [--model default] [--tokens 96] [--rounds 2] [--only NAME …]

One engine in this process, ticked in this thread; a thread compiles the grammar again and again, as if clients sent new
ones. The baseline is the plain stream beside a second plain one. Each round measures baseline and grammar one after the
other; the ratio is of the two medians (p50) and of the two 99th percentiles (p99) of the time between two tokens of the
plain stream. Bar: at most twice the baseline. Legend: compile is the longest time of one compilation, milliseconds;
"fate" is "compiled", or why it was refused. The last line is JSON.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import options, percentile, print_row, random_ids

from nano_inference import BadRequest, EngineConfig, InferenceEngine, SamplingParams
from nano_inference.cli.place import tokenizer_source
from nano_inference.loading.catalog import default_cache, resolve
from nano_inference.text.grammar import Grammar, Grammars
from nano_inference.text.tokenizer import Tokenizer, load_tokenizer
from nano_inference.types import Matcher


def schema(value: object) -> Grammar:
    """Return a JSON schema."""
    return Grammar("json_schema", json.dumps(value))


def words(count: int) -> list[str]:
    """Return random words, always the same."""
    rng = random.Random(count)
    return ["".join(rng.choice("abcdefghijklmnop") for _ in range(8)) for _ in range(count)]


def hard_grammars() -> dict[str, Grammar]:
    """Return the adversaries, of each kind the largest that is accepted or refused late."""
    tree = {"type": "object", "properties": {"l": {"$ref": "#/$defs/n"}, "r": {"$ref": "#/$defs/n"}}}
    choose = [{"anyOf": [{"required": [f"k{i}{j}"]} for j in range(4)]} for i in range(8)]
    refs = {f"{i}": {"items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(1300)}
    times = {"type": "string", "format": "date-time"}
    rows = {"type": "array", "minItems": 100, "maxItems": 1000}
    optional = {f"p{i}": {"type": "string"} for i in range(2000)}
    deep = '{"properties":{"a":' * 10_000 + "{}" + "}}" * 10_000
    chain = "".join(f'r{i}: "a" r{i + 1} | "b"\n' for i in range(1300))
    return {
        "(a+)+$": Grammar("regex", "(a+)+$"),
        "10000 alternatives": Grammar("regex", "|".join(words(10_000))),
        "1 MB regex": Grammar("regex", "ab" * (1 << 19)),
        "(a{1,1000}){1,1000}": Grammar("regex", "(a{1,1000}){1,1000}"),
        "1170 optional classes": Grammar("regex", "".join(f"[a-{'bcdefgh'[i % 7]}]?" for i in range(1170))),
        ".*a.{200}b": Grammar("regex", ".*a.{200}b"),
        "any of .*x.{n}": Grammar("regex", "|".join(f".*{c}.{{{12 + i}}}" for i, c in enumerate("abcdefgh"))),
        "letters {1,500}": Grammar("regex", r"(\p{L}|\p{N}){1,500}\p{Greek}{1,500}"),
        "10000 choices": Grammar("choice", json.dumps(words(10_000))),
        "10000 levels": Grammar("json_schema", deep),  # too deep to be built and dumped
        "recursive $ref": schema({"$ref": "#"}),
        "tree of $ref": schema({"$defs": {"n": tree}, "$ref": "#/$defs/n"}),
        "a chain of $ref": schema({"$defs": {**refs, "1300": {}}, "$ref": "#/$defs/0"}),
        "enum of 100000": schema({"enum": words(100_000)}),
        "enum of 5000": schema({"enum": words(5000)}),
        "minItems a million": schema({"type": "array", "items": {"type": "integer"}, "minItems": 1_000_000}),
        "maxLength a million": schema({"type": "string", "minLength": 1000, "maxLength": 1_000_000}),
        "arrays of arrays": schema({**rows, "items": {**rows, "items": {**rows, "items": {"type": "string"}}}}),
        "allOf of anyOf": schema({"type": "object", "allOf": choose}),
        "two multipleOf": schema({"allOf": [{"type": "integer", "multipleOf": 7919}, {"multipleOf": 7907}]}),
        "2000 optional": schema({"type": "object", "properties": optional}),
        "900 date-times": schema({"type": "object", "properties": {f"{i}": times for i in range(900)}}),
        "a constant of 60 kB": schema({"const": "x y" * 20_000}),
        "a chain of rules": Grammar("lark", f'start: r0\n{chain}r1300: "z"'),
        "ambiguous rules": Grammar("lark", 'start: a\na: a a | a a a | "x" |'),
        "nothing, repeated": Grammar("lark", 'start: a*\na: b* c*\nb: "x"?\nc: "y"? a?'),
        "an answer of JSON": schema({"type": "object", "properties": {"name": {"type": "string"}}}),
    }


class Compiler(threading.Thread):
    """Compiles one grammar again and again until `leave` is called."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, grammar: Grammar) -> None:
        super().__init__()
        self._grammars = Grammars(tokenizer, vocab_size, tokenizer.eos_ids)
        self._grammars.matcher(Grammar("regex", "a"))  # what is built once for all is not this grammar's
        self._grammar, self._leaving = grammar, threading.Event()
        self.make: Callable[[], Matcher] | None = None
        self.longest, self.fate = 0.0, "compiled"

    def run(self) -> None:
        while not self._leaving.wait(0.02):
            self._grammars._compiled.clear()  # as if every client sent another one
            started = time.perf_counter()
            try:
                self.make = self._grammars.matcher(self._grammar)
            except BadRequest as error:
                self.fate = str(error)
            self.longest = max(self.longest, time.perf_counter() - started)

    def leave(self) -> None:
        """Let it end after its present compilation."""
        self._leaving.set()
        self.join()


def gaps(engine: InferenceEngine, prompts: list[list[int]], num_tokens: int, compiler: Compiler | None) -> list[float]:
    """Return the times between tokens of a stream beside another, with the compiler's grammar once there is one."""
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=1)

    def beside() -> int:
        make = compiler.make if compiler is not None else None
        return engine.add_request(prompts[1], params, make_matcher=make, claim=True)

    first, second = engine.add_request(prompts[0], params, claim=True), beside()
    stamps: list[float] = []
    while len(stamps) < num_tokens:
        deltas = engine.tick().deltas
        now = time.perf_counter()
        for delta in deltas:
            if delta.request_id == first:
                stamps += [now] * len(delta.token_ids)
            elif delta.finish_reason and len(stamps) < num_tokens:
                engine.collect(second)
                second = beside()
    engine.collect(first)
    engine.abort(second)
    engine.collect(second)
    return [after - before for before, after in pairwise(stamps)]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=[])
    given = parser.parse_args()
    rows: dict[str, dict[str, object]] = {}
    config = EngineConfig(given.model, device="cpu", num_threads=given.threads, max_tokens_per_batch=256)
    with InferenceEngine(config) as engine:
        tokenizer = load_tokenizer(tokenizer_source(Path(resolve(given.model, default_cache(os.environ)))))
        print_row("", "plain p50", "p99", "p50 x", "p99 x", "compile")
        for name, grammar in hard_grammars().items():
            if given.only and name not in given.only:
                continue
            plain: list[float] = []
            hard: list[float] = []
            for number in range(given.rounds):
                rng = random.Random(number)
                prompts = [random_ids(rng, 32) for _ in range(2)]
                plain += gaps(engine, prompts, given.tokens, None)
                compiler = Compiler(tokenizer, engine.parts.vocab_size, grammar)
                compiler.start()
                hard += gaps(engine, prompts, given.tokens, compiler)
                compiler.leave()
            base = [percentile(plain, share) for share in (0.5, 0.99)]
            ratios = [percentile(hard, share) / one for share, one in zip((0.5, 0.99), base, strict=True)]
            print_row(name, *(1e3 * one for one in base), *ratios, 1e3 * compiler.longest)
            print(f"  {compiler.fate[:100]}")
            rows[name] = {"p50_ratio": ratios[0], "p99_ratio": ratios[1], "compile_ms": 1e3 * compiler.longest}
            rows[name]["fate"] = compiler.fate
    print(json.dumps({"bar": 2.0, "rows": rows}, ensure_ascii=False))


if __name__ == "__main__":
    main()
