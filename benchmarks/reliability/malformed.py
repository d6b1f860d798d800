"""Checks of malformed and oversized requests."""

from __future__ import annotations

import json
from collections.abc import Iterator

from harness import (
    INNARDS,
    Check,
    Finding,
    Lab,
    greedy,
    megabytes,
    milliseconds,
)
from hostile import MIB, flood, raw, statuses
from queueing import COMPLETIONS

# ---- HTTP -----------------------------------------------------------------------------------------------------------


def wire_table() -> Iterator[tuple[str, bytes, list[int]]]:
    """Yield odd requests and the status codes that must come back, in order."""
    host = b"host: 127.0.0.1\r\n"
    body = b'{"prompt": "a"}'
    post = b"POST /tokenize HTTP/1.1\r\n" + host + b"content-type: application/json\r\n"
    whole = post + b"content-length: %d\r\n\r\n" % len(body) + body
    chunked = post + b"transfer-encoding: chunked\r\n\r\n"
    health = b"GET /health HTTP/1.1\r\n" + host
    yield "two pipelined", health + b"\r\n" + health + b"\r\n", [200, 200]
    yield "pipelined behind a body", whole + health + b"\r\n", [200, 200]
    yield "chunked", chunked + b"5\r\n" + body[:5] + b"\r\n%x\r\n" % len(body[5:]) + body[5:] + b"\r\n0\r\n\r\n", [200]
    yield "chunk extension", chunked + b"%x;a=b\r\n" % len(body) + body + b"\r\n0\r\n\r\n", [200]
    yield "bad chunk size", chunked + b"zz\r\n", [400]
    yield "negative chunk size", chunked + b"-5\r\n", [400]
    yield "HEAD", b"HEAD /health HTTP/1.1\r\n" + host + b"\r\n", [200]
    yield "Expect: 100-continue", post + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(body), [100]
    yield "trailing slash", b"GET /health/ HTTP/1.1\r\n" + host + b"\r\n", [404]
    yield "%2e%2e", b"GET /v1/%2e%2e/health HTTP/1.1\r\n" + host + b"\r\n", [404]
    yield "..", b"GET /v1/../health HTTP/1.1\r\n" + host + b"\r\n", [404]
    yield "//", b"GET //health HTTP/1.1\r\n" + host + b"\r\n", [404]
    yield "NUL in a path", b"GET /%00 HTTP/1.1\r\n" + host + b"\r\n", [404]
    yield "unknown path", b"GET /nothing HTTP/1.1\r\n" + host + b"\r\n", [404]
    yield "DELETE", b"DELETE /v1/models HTTP/1.1\r\n" + host + b"\r\n", [405]
    yield "GET where POST", b"GET /v1/completions HTTP/1.1\r\n" + host + b"\r\n", [405]
    yield "OPTIONS", b"OPTIONS /v1/models HTTP/1.1\r\n" + host + b"\r\n", [405]
    bare = b"POST /tokenize HTTP/1.1\r\n" + host + b"content-length: %d\r\n" % len(body)
    yield "no content type", bare + b"\r\n" + body, [200]
    yield "no content type from a page", bare + b"origin: http://other.example\r\n\r\n" + body, [415]
    yield "text/plain", whole.replace(b"application/json", b"text/plain"), [415]
    yield "gzip", whole.replace(b"content-length", b"content-encoding: gzip\r\ncontent-length"), [415]
    yield "Accept: image/png", whole.replace(b"host:", b"accept: image/png\r\nhost:"), [200]
    yield "HTTP/1.0", b"GET /health HTTP/1.0\r\n" + host + b"\r\n", [200]
    yield "no Host", b"GET /health HTTP/1.1\r\n\r\n", [400]
    yield "two Hosts", health + host + b"\r\n", [400]
    yield "negative length", post + b"content-length: -5\r\n\r\n", [400]
    yield "two lengths", whole.replace(b"content-length", b"content-length: 1\r\ncontent-length"), [400]
    yield "transfer-encoding: gzip", post + b"transfer-encoding: gzip\r\n\r\n", [400]
    yield "space before colon", health + b"a : b\r\n\r\n", [400]
    yield "TLS hello", bytes.fromhex("16030100c8010000c40303") + bytes(100), [400]
    yield "header of 100 kB", health + b"a: " + b"b" * 100_000 + b"\r\n\r\n", [400]
    yield (
        "upgrade to websocket without its headers",
        health + b"connection: upgrade\r\nupgrade: websocket\r\n\r\n",
        [400],
    )


async def r45(lab: Lab) -> Finding:
    """Requests that HTTP/1.1 allows, and some that it does not (R19's too)."""
    server = await lab.shared()
    wrong: list[str] = []
    count = 0
    for name, data, expected in wire_table():
        count += 1
        answer = await raw(server, data)
        if statuses(answer) != expected:
            wrong.append(f"{name}: {statuses(answer)} instead of {expected}")
        if name == "HEAD" and answer.partition(b"\r\n\r\n")[2]:
            wrong.append("HEAD has a body")
    return Finding(figures={"rows": count, "wrong": len(wrong)}, is_ok=not wrong, note="; ".join(wrong))


async def t14(lab: Lab) -> Finding:
    """Samples without number."""
    server = await lab.shared()
    base = greedy(lab.prompt(5), 5)
    await server.ask(COMPLETIONS, {**base, "n": 10**9})
    server.forget_peak()
    before, slowest = server.rss, 0.0
    figures: dict[str, float | int | str] = {}
    for name, extra in (("n=1e9", {"n": 10**9}), ("best_of=1e9", {"best_of": 10**9}), ("n=129", {"n": 129})):
        for _ in range(3):
            reply = await server.ask(COMPLETIONS, {**base, **extra})
            slowest = max(slowest, reply.seconds)
        figures[name] = reply.status
    grown = max(0, server.peak_rss - before)
    is_ok = all(status == 400 for status in figures.values()) and slowest <= 0.05 and grown <= 5 * MIB
    return Finding(
        figures={**figures, "slowest ms": milliseconds(slowest), "RSS MB more": megabytes(grown)}, is_ok=is_ok
    )


async def t18(lab: Lab) -> Finding:
    """Heads and bodies that are too large, or that lie about it."""
    server = await lab.shared()
    start = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    server.forget_peak()
    before = server.rss
    heads = {
        "header of 5 MB": start + b"a: " + b"b" * 5_000_000 + b"\r\n\r\n",
        "10k headers": start + b"".join(b"a%d: b\r\n" % i for i in range(10_000)) + b"\r\n",
        "length -1": start + b"content-length: -1\r\n\r\n",
        "length twice": start + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}",
        "length of 1000 digits": start + b"content-length: " + b"9" * 1000 + b"\r\n\r\n",
    }
    figures: dict[str, float | int | str] = {}
    wrong = 0
    for name, data in heads.items():
        got = statuses(await raw(server, data))
        figures[name] = str(got[0]) if got else "closed"
        wrong += bool(got) and not 400 <= got[0] < 500
    chunked = start + b"transfer-encoding: chunked\r\n\r\n"
    status, sent, _ = await flood(server, chunked, 64 * MIB, is_chunked=True)
    grown = max(0, server.peak_rss - before)
    figures |= {"chunks without end": f"{status} after {megabytes(sent)} MB", "RSS MB more": megabytes(grown)}
    alive = await server.health()
    is_ok = wrong == 0 and status == 413 and sent < 64 * MIB and grown < 16 * MIB and alive == 200
    return Finding(figures=figures, is_ok=is_ok)


def bad_bodies() -> Iterator[tuple[str, object]]:
    """Yield bodies that must be refused, many of them large or full of what an error should not repeat."""
    long = "A" * 4500
    yield COMPLETIONS, {"prompt": [long] * 3, "temperature": long}
    yield COMPLETIONS, {"prompt": "a", "stop": [long]}
    yield COMPLETIONS, {"prompt": {"a": {"b": [long] * 20}}}
    yield COMPLETIONS, {"prompt": "a", "logit_bias": {str(i): "x" for i in range(1500)}}
    yield COMPLETIONS, {"prompt": "a", "model": "/usr/lib/python3/../../etc/passwd"}
    yield COMPLETIONS, {"prompt": "a", "model": long}
    yield COMPLETIONS, {"prompt": "a", "bad_words": [""], long: 1}
    yield COMPLETIONS, {"prompt": [2**31 - 1]}
    yield COMPLETIONS, {"prompt": "a", "seed": 2**64}
    yield COMPLETIONS, {"prompt": "word " * 20_000}
    yield "/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": long, "text": "a"}]}]}
    yield "/v1/chat/completions", {"messages": [{"role": long, "content": "a"}]}
    yield "/v1/chat/completions", {"messages": [{"role": "user"}] * 3000}
    yield "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"x": [[]]}}
    yield "/v1/chat/completions", {"messages": [], "chat_template": "{{ ''.__class__.__mro__ }}"}
    yield "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "response_format": {"type": long}}
    yield "/tokenize", {"prompt": 1, "content": long}
    yield "/detokenize", {"tokens": [10**9]}
    yield "/detokenize", {"tokens": [long] * 500}
    yield "/apply-template", {"messages": long}
    yield "/v1/models/" + "a" * 3000, None
    yield "/" + "%41" * 2000, None


async def t24(lab: Lab) -> Finding:
    """What errors tell, and how long they are."""
    server = await lab.shared()
    largest, count = 0, 0
    wrong: list[str] = []
    for path, body in bad_bodies():
        reply = await server.ask(path, body)
        count += 1
        largest = max(largest, len(reply.body))
        text = reply.body.decode()
        if reply.status < 400 or reply.status >= 500 or "error" not in json.loads(text):
            wrong.append(f"{path[:30]} {json.dumps(body)[:60]}: {reply.status}")
        revealed = INNARDS.search(text)
        if revealed and revealed[0] not in json.dumps(body) + path:
            wrong.append(f"{path[:30]} reveals {revealed[0]}")
    figures = {"errors": count, "largest B": largest, "wrong": len(wrong)}
    return Finding(figures=figures, is_ok=not wrong and largest <= 8192, note="; ".join(wrong[:4]))


CHECKS = (
    Check("R45", "odd HTTP, and R19's wrong requests", "exact table", r45),
    Check("T14", "n=1e9, best_of=1e9, n=129", "400 ≤ 50 ms; RSS + ≤ 5 MiB", t14),
    Check("T18", "huge heads, chunks without end", "4xx or closed before 64 MiB; RSS + < 16 MiB", t18),
    Check("T24", "what errors tell", "no addresses, no paths; ≤ 8 KiB", t24),
)
