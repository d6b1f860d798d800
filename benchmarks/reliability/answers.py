"""Check answers: the same tokens in any batch, exact counts, no text of other clients' prompts."""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import Sequence

from harness import Check, Finding, Lab, Server, greedy, in_background, milliseconds, prose, quantile
from queueing import COMPLETIONS, choice_of, differing
from wires import JSON

KEYS = ("first-client-key-0001", "second-client-key-0002")


async def in_groups(server: Server, bodies: Sequence[JSON], size: int, salt: str) -> list[JSON]:
    """Ask for all, so many at once; return the choices in order."""
    out: list[JSON] = []
    for start in range(0, len(bodies), size):
        group = [{**body, "cache_salt": salt} for body in bodies[start : start + size]]
        out += [choice_of(one) for one in await asyncio.gather(*(server.ask(COMPLETIONS, body) for body in group))]
    return out


async def r14(lab: Lab) -> Finding:
    """The same prompts in batches of 1, 2, 4 and 8, in shuffled order."""
    server = await lab.shared()
    chance = random.Random(14)
    count = lab.size(8, 32)
    bodies = [greedy(lab.prompt(chance.randint(5, 60)), lab.size(24, 64)) for _ in range(count)]
    alone = await in_groups(server, bodies, 1, "alone")
    total = wrong = parted = 0
    for size in (2, 4, 8):
        order = chance.sample(range(count), count)
        got = await in_groups(server, [bodies[i] for i in order], size, f"in {size}")
        for index, choice in zip(order, got, strict=True):
            tokens, bad = differing([alone[index]], [choice])
            total, wrong, parted = total + tokens, wrong + bad, parted + (bad > 0)
    share = 1 - wrong / max(1, total)
    figures = {"tokens": total, "differing": wrong, "answers that parted": parted, "same %": round(100 * share, 3)}
    note = "tokens after the first that differs count as differing; docs/performance.md" if wrong else ""
    return Finding(figures=figures, is_ok=total > 0 and share >= 0.999, note=note)


async def r15(lab: Lab) -> Finding:
    """One seed, twenty times, while others come and go."""
    server = await lab.shared()
    chance = random.Random(15)
    body = {**greedy(prose(15), 24), "temperature": 1, "seed": 1}

    async def others(number: int) -> None:
        for _ in range(1000):
            await server.ask(COMPLETIONS, greedy(lab.prompt(chance.randint(5, 80)), chance.randint(5, 30)))

    async with in_background([others(number) for number in range(4)]):
        choices = [choice_of(await server.ask(COMPLETIONS, body)) for _ in range(20)]
    await server.until_load()
    same = sum(one.get("token_ids") == choices[0]["token_ids"] for one in choices)
    return Finding(figures={"identical": same, "of": 20}, is_ok=same == 20)


async def r38(lab: Lab) -> Finding:
    """What usage says, against the tokenizer and the metrics."""
    server = await lab.shared()
    chance = random.Random(38)
    words = ["the", "cat", "sat", "on", "a", "mat", "42", "—", "naïve", "世界", "🙂", "print(", ")", "\n"]
    before = await server.metrics()
    wrong: list[str] = []
    prompts = outputs = 0
    count = lab.size(40, 500)

    async def one(number: int) -> None:
        nonlocal prompts, outputs
        text = " ".join(chance.choices(words, k=chance.randint(1, 30)))
        n, streams = chance.choice((1, 1, 2)), number % 4 == 3
        body: JSON = {"prompt": text, "max_tokens": chance.randint(1, 6), "n": n, "return_token_ids": True}
        known = (await server.ask("/tokenize", {"prompt": text})).json["count"]
        if streams:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        reply = await server.ask(COMPLETIONS, body)
        usage, given = usage_of(reply.body) if streams else whole_usage(reply.json)
        is_right = usage["prompt_tokens"] == known and usage["completion_tokens"] == given
        if not is_right or usage["total_tokens"] != known + given:
            wrong.append(f"{usage} of {known} and {given}")
        prompts, outputs = prompts + n * known, outputs + given

    for start in range(0, count, 8):
        await asyncio.gather(*(one(number) for number in range(start, min(count, start + 8))))
    await server.until_load()
    after = await server.metrics()
    counted = [
        after.value(name) - before.value(name) for name in ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")
    ]
    figures = {
        "requests": count,
        "wrong": len(wrong),
        "prompt, answer tokens": f"{prompts}, {outputs}",
        "metrics": f"{counted[0]:.0f}, {counted[1]:.0f}",
    }
    note = "; ".join(wrong[:2])
    return Finding(figures=figures, is_ok=not wrong and counted == [prompts, outputs], note=note)


def whole_usage(reply: JSON) -> tuple[JSON, int]:
    """Return a reply's usage, and how many tokens it has."""
    return reply["usage"], sum(len(choice["token_ids"]) for choice in reply["choices"])


def usage_of(data: bytes) -> tuple[JSON, int]:
    """Return the usage of a stream, and how many tokens it has."""
    events = [json.loads(one[6:]) for one in data.split(b"\n\n") if one.startswith(b"data: {")]
    choices = [choice for event in events for choice in event["choices"]]
    return events[-1]["usage"], sum(len(choice.get("token_ids") or ()) for choice in choices)


async def r39(lab: Lab) -> Finding:
    """vLLM's table: exact counts after ten prompts of ten tokens with ten tokens each."""
    server = await lab.shared()
    before = await server.metrics()
    for _ in range(10):
        await server.ask(COMPLETIONS, greedy(lab.prompt(10), 10))
    await server.until_load()
    after = await server.metrics()
    expected = {
        "vllm:prompt_tokens_total": 100,
        "vllm:generation_tokens_total": 100,
        "vllm:request_prompt_tokens_sum": 100,
        "vllm:request_prompt_tokens_count": 10,
        "vllm:request_generation_tokens_sum": 100,
        "vllm:request_generation_tokens_count": 10,
        "vllm:request_params_n_sum": 10,
        "vllm:request_params_n_count": 10,
        "vllm:request_params_max_tokens_sum": 100,
        "vllm:request_params_max_tokens_count": 10,
        "vllm:iteration_tokens_total_sum": 200,
        "vllm:time_to_first_token_seconds_count": 10,
        "vllm:inter_token_latency_seconds_count": 90,
        "vllm:request_time_per_output_token_seconds_count": 10,
        "vllm:e2e_request_latency_seconds_count": 10,
        "vllm:request_queue_time_seconds_count": 10,
        "vllm:request_inference_time_seconds_count": 10,
        "vllm:request_prefill_time_seconds_count": 10,
        "vllm:request_decode_time_seconds_count": 10,
        "vllm:request_success_total": 10,
    }
    cached = after.value("vllm:prefix_cache_hits_total") - before.value("vllm:prefix_cache_hits_total")
    expected["vllm:iteration_tokens_total_sum"] -= int(cached)
    wrong = {
        name: after.value(name) - before.value(name)
        for name, count in expected.items()
        if after.value(name) - before.value(name) != count
    }
    note = "; ".join(f"{name} {value:g} instead of {expected[name]}" for name, value in wrong.items())
    return Finding(figures={"series": len(expected), "wrong": len(wrong)}, is_ok=not wrong, note=note)


def mann_whitney(left: Sequence[float], right: Sequence[float]) -> float:
    """Return the two-sided p of the Mann-Whitney U test by its normal approximation, with mean ranks for ties."""
    ordered = sorted([(value, 0) for value in left] + [(value, 1) for value in right])
    ranks = 0.0
    start = 0
    while start < len(ordered):
        end = start
        while end < len(ordered) and ordered[end][0] == ordered[start][0]:
            end += 1
        ranks += (start + end + 1) / 2 * sum(side == 0 for _, side in ordered[start:end])
        start = end
    n, m = len(left), len(right)
    u = ranks - n * (n + 1) / 2
    z = (u - n * m / 2) / math.sqrt(n * m * (n + m + 1) / 12)
    return math.erfc(abs(z) / math.sqrt(2))


async def t29(lab: Lab) -> Finding:
    """Whether one client can see that another has asked the same before."""
    size = lab.size(48, 256)
    key_file = lab.scratch / "keys"
    key_file.write_text("\n".join(KEYS) + "\n")
    key_file.chmod(0o600)
    primed: list[float] = []
    fresh: list[float] = []
    seen = own = 0
    async with lab.server({"--api-key-file": str(key_file)}, waits=False) as server:
        await server.ready()
        first, second = ([f"authorization: Bearer {key}"] for key in KEYS)
        if not lab.vocab_size:
            lab.vocab_size = (await server.ask("/tokenizer_info", None, first)).json["model_vocab_size"]
        for number in range(104):
            # Each begins with a token of its own: even one shared by chance would be a hit among one's own prompts.
            secret, other = ([30 + 2 * number + i, *lab.prompt(size - 1)] for i in (0, 1))
            await server.ask(COMPLETIONS, greedy(secret, 1), first)
            began = time.monotonic()
            reply = await server.ask(COMPLETIONS, greedy(other if number % 2 else secret, 1), second)
            if number < 4:
                continue
            (fresh if number % 2 else primed).append(time.monotonic() - began)
            seen += reply.json["usage"]["prompt_tokens_details"]["cached_tokens"]
            if number < 14:
                again = await server.ask(COMPLETIONS, greedy(secret, 1), first)
                own += again.json["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    p = mann_whitney(primed, fresh)
    figures = {
        "probes": len(primed) + len(fresh),
        "cached tokens across keys": seen,
        "same key hits of 10": own,
        "median primed, fresh ms": f"{milliseconds(quantile(primed, 0.5))}, {milliseconds(quantile(fresh, 0.5))}",
        "Mann-Whitney p": round(p, 3),
    }
    return Finding(figures=figures, is_ok=seen == 0 and own == 10 and p >= 0.01)


CHECKS = (
    Check("R14", "batches of 1, 2, 4, 8, shuffled", "≥ 99.9 % same greedy tokens", r14),
    Check("R15", "seed 1, 20 times, beside others", "20 of 20 identical", r15),
    Check("R38", "usage against tokenizer and metrics", "exact", r38),
    Check("R39", "metrics after 10 × 10 tokens", "exact counts of 20 series", r39),
    Check("T29", "100 probes across two API keys", "0 cached tokens; p ≥ 0.01", t29),
)
