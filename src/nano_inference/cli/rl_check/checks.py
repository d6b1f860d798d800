"""What a trainer may rely on in a rollout server: one function a property, each of which can fail.

Each raises `Failed` with what came back, `NotOffered`, or returns a note. Weights are never read: A and B are any two
sets, and the server starts with A.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nano_inference.cli.rl_check.servers import Failed, NotOffered, Sample, Server

IMPOSSIBLE = -9000.0
"""Servers report about -9999 for tokens of probability 0."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the command was given. A and B are directories of weights, BAD is B with a NaN."""

    vocab_size: int
    a: str | None = None
    b: str | None = None
    bad: str | None = None
    adapter: str | None = None
    pid: int | None = None
    tolerance: float = 0.0
    long: int = 1500  # tokens of an answer that is interrupted


class Trial:
    """One check's server, options and threads, and whether a comparison had unequal bits."""

    def __init__(self, server: Server, options: Options, pool: ThreadPoolExecutor) -> None:
        self.server, self.options, self.start = server, options, pool.submit
        self.vocab_size = options.vocab_size
        self.is_bitwise = True

    def prompt(self, number: int, length: int = 33) -> list[int]:
        """Return a text of ids above 0."""
        terms = ((7 * number + 5 * j + j * j * (number + 1)) % (self.vocab_size - 1) for j in range(length))
        return [1 + term for term in terms]

    def sample(self, ids: Sequence[int], **params: Any) -> list[Sample]:
        """Generate; greedily with a tolerance, because a sampled token can change with one bit of a logit."""
        if self.options.tolerance:
            params["temperature"] = 0.0
        return self.server.generate(ids, **params)

    def same(self, one: Sequence[Sample], other: Sequence[Sample]) -> bool:
        """Return whether two replies have equal ids, and log-probabilities equal within the tolerance."""
        if [x.ids for x in one] != [x.ids for x in other]:
            return False
        return all(self.near(x.logprobs, y.logprobs) for x, y in zip(one, other, strict=True))

    def near(self, one: Sequence[float | None], other: Sequence[float | None]) -> bool:
        """Return whether values are equal within the tolerance."""
        if list(one) == list(other):
            return True
        self.is_bitwise = False
        return len(one) == len(other) and all(
            x == y or (x is not None and y is not None and abs(x - y) <= self.options.tolerance)
            for x, y in zip(one, other, strict=True)
        )

    def directory(self, name: str) -> str:
        """Return a directory. Raises `NotOffered` if its option was left out."""
        found: str | None = getattr(self.options, name)
        if found is None:
            raise NotOffered(f"not asked: give --{name}")
        return found

    def install(self, name: str, label: str) -> None:
        """Install a set of weights."""
        status, text = self.server.act("update", self.directory(name), label)
        require(status == 200, f"the update was refused: {status} {text[:160]}")

    def interrupted(
        self, act: Callable[[], object], is_early: Callable[[Sample], bool | None], **params: Any
    ) -> Sample:
        """Return a long answer into whose middle `act` fell: `is_early` is None. Waits longer or shorter until then."""
        wait = 0.1
        for _ in range(12):
            running = self.start(self.sample, self.prompt(7), **self.whole(), **params)
            time.sleep(wait)
            act()
            (found,) = running.result()
            verdict = is_early(found)
            if verdict is None:
                return found
            wait *= 2 if verdict else 0.5
        raise Failed(f"in 12 tries no answer was interrupted; the last had {len(found.ids)} tokens, {found.reason}")

    def whole(self) -> dict[str, Any]:
        """Return the parameters of a long answer."""
        return {"max_tokens": self.options.long, "seed": 1, "ignore_eos": True}


def require(condition: object, text: str) -> None:
    if not condition:
        raise Failed(text)


# ---- sampling -------------------------------------------------------------------------------------------------------


def seeds_repeat(t: Trial) -> None:
    one, two = (t.server.generate(t.prompt(1), n=4, seed=5) for _ in range(2))
    require(t.same(one, two), "the same seed gave other tokens or log-probabilities")
    require([x.ids for x in t.server.generate(t.prompt(1), n=4, seed=6)] != [x.ids for x in one], "no effect of seed")


def batch_invariance_under_load(t: Trial) -> str:
    asked = [(t.prompt(i, 5 + 9 * i), {"seed": i, "max_tokens": 16 + 4 * i}) for i in range(8)]
    alone = [t.sample(ids, **params) for ids, params in asked]
    t.server.act("flush")
    crowd = [t.start(t.sample, t.prompt(50 + i, 20 + i), n=2, seed=i, max_tokens=40) for i in range(8)]
    found = [one.result() for one in [t.start(t.sample, ids, **params) for ids, params in asked]]
    [one.result() for one in crowd]
    equal = sum(t.same(x, y) for x, y in zip(alone, found, strict=True))
    require(equal == 8, f"{equal} of 8 requests had the same tokens and log-probabilities among others")
    return "8 of 8 among 16 others"


def group_has_no_clones(t: Trial) -> None:
    for seed in (None, 3):
        found = {x.ids for x in t.server.generate(t.prompt(2), n=8, max_tokens=16, seed=seed)}
        require(len(found) == 8, f"{len(found)} different samples of 8 with the seed {seed}")


def nucleus_is_normalised(t: Trial) -> str:
    found = t.server.generate(t.prompt(3), n=2, max_tokens=4, top_p=0.5, top=t.vocab_size, seed=1)
    kept = [[v for v in top.values() if v > IMPOSSIBLE] for x in found for top in x.tops]
    masses = [sum(map(math.exp, values)) for values in kept]
    sizes = [len(values) for values in kept]
    require(masses, "no alternatives came back")
    is_right = all(abs(mass - 1) < 1e-5 for mass in masses) and min(sizes) < t.vocab_size / 2
    require(is_right, f"mass {min(masses):.3f} to {max(masses):.3f} over up to {max(sizes)} ids: not renormalised")
    return f"mass 1 over {min(sizes)} to {max(sizes)} ids"


def temperature_is_accounted_for(t: Trial) -> None:
    one, two = (
        t.server.generate(t.prompt(4), temperature=x, top=t.vocab_size, max_tokens=1, seed=1)[0].tops[0]
        for x in (1.0, 0.5)
    )
    log_mass = math.log(sum(math.exp(2 * value) for value in one.values()))
    off = max((abs(two[i] - (2 * v - log_mass)) for i, v in one.items() if two.get(i, -99.0) > -30), default=99.0)
    require(off < max(1e-4, t.options.tolerance), f"off by {off:.1e}: the values are those of temperature 1")


def stop_token_has_a_logprob(t: Trial) -> None:
    (whole,) = t.sample(t.prompt(3), seed=2, max_tokens=12, ignore_eos=True)
    stop = whole.ids[7]
    at = whole.ids.index(stop) + 1
    (cut,) = t.sample(t.prompt(3), seed=2, max_tokens=12, ignore_eos=True, stop_token_ids=[stop])
    is_right = cut.reason == "stop" and cut.ids == whole.ids[:at] and t.near(cut.logprobs, whole.logprobs[:at])
    require(is_right, f"{cut.reason} with {len(cut.ids)} ids and {len(cut.logprobs)} values, expected {at} of each")


def banned_tokens_leave_the_mass(t: Trial) -> None:
    asked: dict[str, Any] = {"seed": 2, "max_tokens": 1, "min_tokens": 1, "stop_token_ids": [5]}
    top = t.server.generate(t.prompt(3), top=t.vocab_size, **asked)[0].tops[0]
    mass = sum(math.exp(value) for token, value in top.items() if token != 5 and value > IMPOSSIBLE)
    require(top.get(5, -9999.0) <= -30, f"the banned token has the log-probability {top.get(5)}")
    require(abs(mass - 1) < 1e-5, f"mass without the banned token {mass:.6f}")


def values_are_json_numbers(t: Trial) -> None:
    found = [v for i in range(3) for x in t.server.generate(t.prompt(i), n=2, top_k=1) for v in x.logprobs]
    wrong = [v for v in found if not isinstance(v, int | float) or not -10000 <= v <= 0]
    require(found and not wrong, f"{wrong[:3]} among {len(found)} values")


def streams_equal_whole_replies(t: Trial) -> None:
    asked: dict[str, Any] = {"n": 3, "seed": 4, "max_tokens": 20} | (
        {"temperature": 0.0} if t.options.tolerance else {}
    )
    whole, streamed = t.server.generate(t.prompt(5), **asked), t.server.stream(t.prompt(5), **asked)
    require(t.same(whole, streamed), f"{len(streamed)} samples streamed: {[len(x.ids) for x in streamed]} ids, other")


def forced_tokens_cost_nothing(t: Trial) -> None:
    try:
        (x,) = t.server.generate(t.prompt(6), structured_outputs={"regex": "ab{3}a"}, max_tokens=12)
    except Failed as error:
        raise NotOffered(str(error)) from error
    mask = x.mask or (1,) * len(x.ids)
    wrong = [value for value, is_sampled in zip(x.logprobs, mask, strict=True) if is_sampled and value < -3]
    require(not wrong, f"a token without a choice has the log-probability {min(wrong, default=0):.2f} and no mask")


# ---- scores ---------------------------------------------------------------------------------------------------------


def prompt_scores_survive_prefix_hits(t: Trial) -> None:
    t.server.act("flush")
    cold = t.server.scores([t.prompt(5, 60)])[0]
    t.server.generate(t.prompt(5, 60)[:40] + t.prompt(9, 8), n=2)
    warm = t.server.scores([t.prompt(5, 60)])[0]
    is_whole = len(cold) == 60 and cold[0] is None and None not in cold[1:]
    require(is_whole, f"{len(cold)} values for 60 tokens; expected None and 59 numbers")
    require(t.near(cold, warm), f"{sum(x != y for x, y in zip(cold, warm, strict=False))} of 60 differ")


def prompt_scores_keep_their_order(t: Trial) -> None:
    texts = [t.prompt(i, 10 + 13 * i) for i in range(7)]
    alone = [t.server.scores([ids])[0] for ids in texts]
    order = [3, 6, 0, 5, 1, 4, 2]
    found = t.server.scores([texts[i] for i in order])
    wrong = sum(not t.near(alone[i], one) for i, one in zip(order, found, strict=True))
    require(not wrong, f"{wrong} of 7 texts have other values in another order")


def samples_equal_their_scores(t: Trial) -> str:
    off, equal, total = 0.0, 0, 0
    for i in range(4):
        for x in t.server.generate(t.prompt(i), n=2, seed=i):
            again = t.server.scores([[*t.prompt(i), *x.ids]])[0][33:]
            gaps = [abs(y - z) if y is not None else 99.0 for y, z in zip(again, x.logprobs, strict=True)]
            off, equal, total = max([off, *gaps]), equal + gaps.count(0.0), total + len(gaps)
    require(off < max(1e-4, t.options.tolerance), f"off by {off:.1e}")
    return f"{equal} of {total} bit for bit, at most {off:.0e} off"


def ids_are_not_retokenised(t: Trial) -> None:
    split = [1, 14] * 10  # in the model of the tests "a", "n", which its tokenizer merges
    one, two = t.server.scores([split, [*split, 1]])
    is_whole = len(one) == 20 and None not in one[1:]
    require(is_whole and t.near(one, two[:20]), f"{len(one)} values for 20 ids, or of other ids: the prompt changed")
    (x,) = t.server.generate(split, seed=2)
    require(len(x.ids) == len(x.logprobs), f"{len(x.ids)} ids and {len(x.logprobs)} values")


# ---- interruptions --------------------------------------------------------------------------------------------------


def continuation_equals_whole(t: Trial) -> str:
    (whole,) = t.server.generate(t.prompt(6), temperature=0.0, ignore_eos=True)
    (rest,) = t.server.generate([*t.prompt(6), *whole.ids[:9]], temperature=0.0, max_tokens=15, ignore_eos=True)
    is_same = rest.ids == whole.ids[9:] and t.near(rest.logprobs, whole.logprobs[9:])
    require(is_same, "greedy: other tokens or log-probabilities than in one request")
    return "greedy"


def abort_returns_the_partial(t: Trial) -> str:
    def is_early(x: Sample) -> bool | None:
        return None if x.ids and x.reason == "abort" else x.reason == "abort"

    x = t.interrupted(lambda: t.server.act("abort", "rl-check-abort"), is_early, name="rl-check-abort")
    require(len(x.ids) == len(x.logprobs), f"{len(x.ids)} ids, {len(x.logprobs)} values")
    (rest,) = t.sample([*t.prompt(7), *x.ids], **{**t.whole(), "max_tokens": 8})
    (whole,) = t.sample(t.prompt(7), **{**t.whole(), "max_tokens": len(x.ids) + 8})
    require(x.ids == whole.ids[: len(x.ids)], "the partial answer is not the beginning of the whole one")
    is_same = rest.ids == whole.ids[len(x.ids) :] and t.near(rest.logprobs, whole.logprobs[len(x.ids) :])
    return f"{len(x.ids)} tokens; its continuation {'equals' if is_same else 'differs from'} the whole"


def pause_keeps_requests(t: Trial) -> None:
    (plain,) = t.sample(t.prompt(8), **t.whole())
    started = time.monotonic()
    t.sample(t.prompt(9), seed=1)
    usual_s = time.monotonic() - started
    running = t.start(t.sample, t.prompt(8), **t.whole())
    time.sleep(0.1)
    status, _ = t.server.act("pause")
    late = t.start(t.sample, t.prompt(9), seed=1)
    time.sleep(max(1.0, 5 * usual_s))
    has_run = late.done()
    t.server.act("resume")
    found = running.result()
    late.result()
    require(status == 200 and not has_run, f"status {status}; a new request {'ran' if has_run else 'waited'} meanwhile")
    require(t.same(found, [plain]), "the pause changed a request's output")


# ---- weights --------------------------------------------------------------------------------------------------------


def _answers(t: Trial) -> list[Sample]:
    """Return what depends on the weights: four samples, and the scores of four prompts as those of samples."""
    texts = [t.prompt(i, 48) for i in range(4)]
    samples = [x for i, ids in enumerate(texts) for x in t.sample(ids, seed=i)]
    return samples + [Sample((), tuple(values)) for values in t.server.scores(texts)]


def update_drops_stale_kv(t: Trial) -> None:
    t.install("a", "A1")
    old = _answers(t)
    t.install("b", "B1")
    warm = _answers(t)
    t.server.act("flush")
    cold = _answers(t)
    require([x.logprobs for x in warm] != [x.logprobs for x in old], "the update had no effect")
    require(t.same(warm, cold), "answers after an update depend on the cache of before")
    t.install("a", "A2")
    require(t.same(_answers(t), old), "the first weights, installed again, give other answers")


def versions_label_every_token(t: Trial) -> str:
    def is_early(x: Sample) -> bool | None:
        if len(x.spans) == 2:
            return None
        t.install("a", "va")
        return bool(x.spans[0]["version"] != plain.spans[0]["version"])

    t.install("a", "va")
    (plain,) = t.sample(t.prompt(7), **t.whole())
    require(plain.spans, "no version of the weights for each token")
    x = t.interrupted(lambda: t.install("b", "vb"), is_early)
    t.install("a", "va")
    first, second = x.spans
    cut = first["end"]
    is_whole = first["start"] == 0 and second["start"] == cut and second["end"] == len(x.ids)
    require(is_whole and first["version"] != second["version"], f"spans {x.spans} for {len(x.ids)} tokens")
    is_same = x.ids[:cut] == plain.ids[:cut] and t.near(x.logprobs[:cut], plain.logprobs[:cut])
    require(is_same, "tokens before the update changed")
    require(x.logprobs[cut:] != plain.logprobs[cut:], "tokens after it have the old weights")
    return f"{cut} tokens of {first['version']}, {len(x.ids) - cut} of {second['version']}"


def bad_update_changes_nothing(t: Trial) -> str:
    bad, missing = t.directory("bad"), f"{t.directory('b')}-no-such"
    before, version = t.sample(t.prompt(2), n=2, seed=1), t.server.version()
    (status, text), (other, _) = t.server.act("update", bad, "bad"), t.server.act("update", missing, "none")
    require(status >= 400 and other >= 400, f"status {status} for NaN, {other} for a missing directory")
    require(t.same(t.sample(t.prompt(2), n=2, seed=1), before), "answers changed")
    require(t.server.version() == version, "the version changed")
    return text[:110]


def updates_at_once_do_not_mix(t: Trial) -> str:
    known = []
    for name in ("b", "a"):
        t.install(name, name)
        known.append(_answers(t))
    both = [t.start(t.server.act, "update", t.directory(name), name) for name in ("a", "b", "a", "b")]
    statuses = [one.result()[0] for one in both]
    found = _answers(t)
    is_one = any(t.same(found, one) for one in known)
    t.install("a", "a")
    require(200 in statuses and is_one, f"statuses {statuses}; the answers are those of one set: {is_one}")
    return f"statuses {statuses}"


def sleep_frees_memory(t: Trial) -> str:
    def resident_mib() -> int:
        lines = Path(f"/proc/{t.options.pid}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) // 1024

    if t.options.pid is None:
        raise NotOffered("not asked: give --pid")
    for one in [t.start(t.sample, t.prompt(i, 450), n=4, max_tokens=4) for i in range(16)]:
        one.result()
    before, full = t.sample(t.prompt(1), seed=1), resident_mib()
    (status, _), asleep, (woken, _) = t.server.act("sleep"), resident_mib(), t.server.act("wake")
    require((status, woken) == (200, 200), f"status {status} for sleep, {woken} for waking")
    require(t.same(t.sample(t.prompt(1), seed=1), before), "another answer after waking")
    require(asleep < full, f"{full} MiB before, {asleep} MiB asleep")
    return f"{full} MiB, {asleep} asleep, {resident_mib()} after waking"


def adapters_leave_the_base_alone(t: Trial) -> None:
    directory = t.directory("adapter")
    before = t.sample(t.prompt(1), seed=1)
    status, _ = t.server.act("load adapter", "rl-check", directory)
    require(status == 200, f"loading the adapter: status {status}")
    adapted, beside = t.sample(t.prompt(1), seed=1, adapter="rl-check"), t.sample(t.prompt(1), seed=1)
    t.server.act("unload adapter", "rl-check")
    require(t.same(before, beside), "requests without an adapter changed")
    require([x.logprobs for x in adapted] != [x.logprobs for x in before], "the adapter had no effect")
