"""What a hard grammar costs its neighbours: a plain stream beside each one, while it compiles and while it is sampled.

    python benchmarks/reliability/grammars.py [--model default] [--tokens 96] [--repeat 2] [--only NAME …]

One engine in this process, ticked in this thread as the server's does it; compiling is a thread's work, as the server
has it. The baseline is the plain stream beside a second plain one: another row makes every step slower whatever it is
held to, so that only what the grammar adds is charged to it. Each round measures baseline and grammar one after the
other; the ratio is of the two medians (p50) and of the two 99th percentiles (p99) of the time between two tokens of
the plain stream, over all rounds. A grammar that is refused is compiled, and refused, again and again beside the
stream. Bar: at most twice the baseline. Legend: compile is the longest time that one took, milliseconds; fate what
became of it: refused, done, or ended by its limits. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from nano_inference import BadRequest, EngineConfig, InferenceEngine, SamplingParams
from nano_inference.cli.place import tokenizer_source
from nano_inference.loading.catalog import default_cache, resolve
from nano_inference.text.grammar import Grammar, Grammars
from nano_inference.text.tokenizer import Tokenizer, load_tokenizer
from nano_inference.types import Matcher

BAR = 2.0


def schema(value: object) -> Grammar:
    """A JSON schema."""
    return Grammar("json_schema", json.dumps(value))


def words(count: int) -> list[str]:
    """Random words, always the same."""
    rng = random.Random(count)
    return ["".join(rng.choice("abcdefghijklmnop") for _ in range(8)) for _ in range(count)]


def deep(levels: int) -> str:
    """A schema of objects in objects, as text: too deep to be built and dumped."""
    return '{"properties":{"a":' * levels + "{}" + "}}" * levels


def many_optional(count: int) -> Grammar:
    """An object any of whose many properties may be left out."""
    return schema({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(count)}})


def chained(count: int) -> Grammar:
    """Definitions each of which refers to the next."""
    refs = {f"{i}": {"items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(count)}
    return schema({"$defs": {**refs, f"{count}": {}}, "$ref": "#/$defs/0"})


def make_hard() -> dict[str, Grammar]:
    """The adversaries: those of the bar first, then our own."""
    tree = {"type": "object", "properties": {"l": {"$ref": "#/$defs/n"}, "r": {"$ref": "#/$defs/n"}}}
    times = {"type": "string", "format": "date-time"}
    choose = [{"anyOf": [{"required": [f"k{i}{j}"]} for j in range(4)]} for i in range(8)]
    rows = {"type": "array", "minItems": 100, "maxItems": 1000}
    maybe = "".join(f"[a-{'bcdefgh'[i % 7]}]?" for i in range(1170))
    chain = "".join(f'r{i}: "a" r{i + 1} | "b"\n' for i in range(1300))
    return {
        "(a+)+$": Grammar("regex", "(a+)+$"),
        "10000 alternatives": Grammar("regex", "|".join(words(10_000))),
        "10000 choices": Grammar("choice", json.dumps(words(10_000))),
        "10000 levels": Grammar("json_schema", deep(10_000)),
        "recursive $ref": schema({"$ref": "#"}),
        "tree of $ref": schema({"$defs": {"n": tree}, "$ref": "#/$defs/n"}),
        "1 MB regex": Grammar("regex", "ab" * (1 << 19)),
        "enum of 100000": schema({"enum": words(100_000)}),
        "enum of 5000": schema({"enum": words(5000)}),
        "(a{1,1000}){1,1000}": Grammar("regex", "(a{1,1000}){1,1000}"),
        "a{100000}": Grammar("regex", "a{100000}"),
        "1170 optional classes": Grammar("regex", maybe),
        ".*a.{200}b": Grammar("regex", ".*a.{200}b"),
        "any of .*x.{n}": Grammar("regex", "|".join(f".*{c}.{{{12 + i}}}" for i, c in enumerate("abcdefgh"))),
        "letters {1,500}": Grammar("regex", r"(\p{L}|\p{N}){1,500}\p{Greek}{1,500}"),
        "minItems a million": schema({"type": "array", "items": {"type": "integer"}, "minItems": 1_000_000}),
        "maxLength a million": schema({"type": "string", "minLength": 1000, "maxLength": 1_000_000}),
        "arrays of arrays": schema({**rows, "items": {**rows, "items": {**rows, "items": {"type": "string"}}}}),
        "allOf of anyOf": schema({"type": "object", "allOf": choose}),
        "two multipleOf": schema({"allOf": [{"type": "integer", "multipleOf": 7919}, {"multipleOf": 7907}]}),
        "240 optional": many_optional(240),
        "2000 optional": many_optional(2000),
        "900 date-times": schema({"type": "object", "properties": {f"{i}": times for i in range(900)}}),
        "a constant of 60 kB": schema({"const": "x y" * 20_000}),
        "a chain of $ref": chained(1300),
        "a chain of rules": Grammar("lark", f'start: r0\n{chain}r1300: "z"'),
        "ambiguous rules": Grammar("lark", 'start: a\na: a a | a a a | "x" |'),
        "nothing, repeated": Grammar("lark", 'start: a*\na: b* c*\nb: "x"?\nc: "y"? a?'),
        "left recursion": Grammar("lark", 'start: e\ne: e "+" e | e "*" e | "(" e ")" | /[0-9]+/'),
        "(a{1,1000}){1,1000} rules": Grammar("lark", 'start: (a{1,1000}){1,1000}\na: b{0,1000}\nb: "x" | /y+/'),
        "an answer of JSON": schema({"type": "object", "properties": {"name": {"type": "string"}}}),
    }


@dataclass
class Measured:
    """Times between two tokens of the plain stream."""

    plain: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    compile_s: float = 0.0
    fate: str = ""

    def ratios(self) -> tuple[float, float]:
        """Grammar over baseline at the median and at the 99th percentile."""
        fifty, ninety_nine = (percentile(self.beside, q) / percentile(self.plain, q) for q in (0.5, 0.99))
        return fifty, ninety_nine


def percentile(values: list[float], share: float) -> float:
    """The value below which that share of them lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class Round:
    """One engine and the two streams of a round; the second may be replaced when it ends."""

    def __init__(self, engine: InferenceEngine, num_tokens: int) -> None:
        self.engine = engine
        self.params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=1)

    def run(
        self, prompts: tuple[list[int], list[int]], make: Callable[[], Callable[[], Matcher] | None]
    ) -> list[float]:
        """Return the gaps of the first stream; `make` gives the second its matcher, anew whenever it has ended."""
        first = self.engine.add_request(prompts[0], self.params, claim=True)
        second = self.engine.add_request(prompts[1], self.params, make_matcher=make(), claim=True)
        stamps: list[float] = []
        while len(stamps) < (self.params.max_tokens or 0):
            deltas = self.engine.tick().deltas
            now = time.perf_counter()
            for delta in deltas:
                if delta.request_id == first:
                    stamps += [now] * len(delta.token_ids)
                elif delta.finish_reason and len(stamps) < (self.params.max_tokens or 0):
                    self.engine.collect(second)
                    second = self.engine.add_request(prompts[1], self.params, make_matcher=make(), claim=True)
        self.engine.collect(first)
        if self.engine.has_pending():
            self.engine.abort(second)
        self.engine.collect(second)
        return [after - before for before, after in pairwise(stamps)]


class Compiler(threading.Thread):
    """Compiles one grammar repeatedly, as if clients sent new ones, until `leave` is called."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, grammar: Grammar) -> None:
        super().__init__()
        self._grammars = Grammars(tokenizer, vocab_size, tokenizer.eos_ids)
        self._grammars.matcher(Grammar("regex", "a"))  # what is built once for all is not this grammar's
        self._grammar = grammar
        self._leaving = threading.Event()
        self.make: Callable[[], Matcher] | None = None
        self.longest = 0.0
        self.refusal = ""

    def run(self) -> None:
        for _ in range(100_000):
            self._grammars._compiled.clear()  # as if every client sent another one
            started = time.perf_counter()
            try:
                self.make = self._grammars.matcher(self._grammar)
            except BadRequest as error:
                self.refusal = str(error)
            self.longest = max(self.longest, time.perf_counter() - started)
            if self._leaving.wait(0.02):
                return

    def leave(self) -> None:
        """Let it end after what it does now."""
        self._leaving.set()
        self.join()


def measure(engine: InferenceEngine, tokenizer: Tokenizer, grammar: Grammar, num_tokens: int, repeat: int) -> Measured:
    """Measure one grammar: two plain streams, then one beside the grammar's, in turns."""
    found = Measured()
    streams = Round(engine, num_tokens)
    rng = random.Random(0)
    compiler = Compiler(tokenizer, engine.parts.vocab_size, grammar)
    for _ in range(repeat):
        prompts = tuple([rng.randrange(1000, 40_000) for _ in range(32)] for _ in range(2))
        found.plain += streams.run(prompts, lambda: None)
        thread = compiler if not compiler.ident else Compiler(tokenizer, engine.parts.vocab_size, grammar)
        thread.start()
        found.beside += streams.run(prompts, lambda one=thread: one.make)
        thread.leave()
        found.compile_s = max(found.compile_s, thread.longest)
        found.fate = thread.refusal
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="default")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--only", nargs="*", default=[])
    arguments = parser.parse_args()
    rows: dict[str, dict[str, object]] = {}
    with InferenceEngine(
        EngineConfig(model_path=arguments.model, device="cpu", num_threads=arguments.threads, max_tokens_per_batch=256)
    ) as engine:
        tokenizer = load_tokenizer(tokenizer_source(Path(resolve(arguments.model, default_cache(os.environ)))))
        print(f"{'':<28}{'plain p50':>10}{'p99':>8}{'p50 x':>8}{'p99 x':>8}{'compile':>9}  fate")
        for name, grammar in make_hard().items():
            if arguments.only and name not in arguments.only:
                continue
            found = measure(engine, tokenizer, grammar, arguments.tokens, arguments.repeat)
            fifty, ninety_nine = found.ratios()
            plain = [1e3 * percentile(found.plain, share) for share in (0.5, 0.99)]
            row = f"{name:<28}{plain[0]:>10.1f}{plain[1]:>8.1f}{fifty:>8.2f}{ninety_nine:>8.2f}"
            print(f"{row}{1e3 * found.compile_s:>9.1f}  {found.fate[:70] or 'compiled'}", flush=True)
            rows[name] = {"p50_ratio": fifty, "p99_ratio": ninety_nine, "compile_ms": 1e3 * found.compile_s}
            rows[name]["refused"] = found.fate
    worst = max(float(str(row["p50_ratio"])) for row in rows.values())
    print(json.dumps({"bar": BAR, "worst_p50_ratio": worst, "rows": rows}, ensure_ascii=False))


if __name__ == "__main__":
    main()
