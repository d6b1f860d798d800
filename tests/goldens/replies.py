"""Sends golden requests, and brings replies into the form in which they are stored and compared."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx2

from tests.goldens.cases import DIALECTS, JSON, STREAMED, Case

REPLIES = Path(__file__).parent / "replies"
TOLERANCE = 1e-4
"""Largest difference of two numbers, relative above 1."""
TIMES = re.compile(
    r"(created|modified|completed|expires|started)(_at)?|.*_(duration|ms|latency)|.*per_second|uptime.*|.*_time"
)
"""Fields whose value is a time or a speed."""
SIZES = frozenset({"size", "size_vram", "rss", "num_threads"})
"""Fields that depend on the machine."""
FINGERPRINT = re.compile(r"(b\d+\.\d+\.\d+)-[0-9a-f]{8}")
"""A `system_fingerprint`: its digest is of facts that contain the processor's instructions."""
IDS = re.compile(r"[0-9a-f]{8}(-?[0-9a-f]{4}){3}-?[0-9a-f]{12}|\b[0-9a-f]{16,}\b|(?<=_)[0-9a-zA-Z]{16,}\b")
JOINED = frozenset(
    {"content", "text", "delta", "partial_json", "arguments", "reasoning_content", "reasoning", "response"}
) | {
    *("thinking", "tokens", "token_ids", "output_ids", "token_logprobs", "top_logprobs", "text_offset", "logprobs"),
    *("completion_probabilities", "mask", "raw_logprobs", "sampling_mask", "token"),
}
"""Fields of a delta that continue those of the delta before."""
COUNTED = frozenset({"sequence_number", "usage", "completion_tokens", "tokens_predicted", "timings"})
"""Fields of which the last delta's value counts."""


def replies_of(dialect: str, urls: Mapping[str, str], models: Path) -> JSON:
    """Return {name of a case: its replies in comparable form}; `models` is masked in texts."""
    found: JSON = {}
    for case in DIALECTS[dialect]:
        reply: JSON = {"whole": _ask(case, urls, {"stream": False} if dialect == "ollama" else {})}
        if dialect in STREAMED and case.body is not None:
            reply["stream"] = _ask(case, urls, {"stream": True})
        name = case.name if case.name not in found else f"{case.name}, again"
        found[name] = json.loads(json.dumps(reply).replace(str(models), "MODELS"))
    return found


def _ask(case: Case, urls: Mapping[str, str], more: JSON) -> JSON:
    url = urls[case.server] + case.path
    if case.body is None:
        reply = httpx2.get(url, timeout=60)
    else:
        reply = httpx2.post(url, json={**case.body, **more}, headers=dict(case.headers), timeout=60)
    kind = reply.headers.get("content-type", "")
    stored: JSON = {"status": reply.status_code, "type": kind}
    if kind.startswith("application/json"):
        return {**stored, "body": masked(reply.json())}
    if kind.startswith("text/event-stream"):
        return {**stored, "events": joined([_event(block) for block in reply.text.split("\n\n") if block.strip()])}
    if kind.startswith("application/x-ndjson"):
        return {**stored, "events": joined([masked(json.loads(line)) for line in reply.text.splitlines()])}
    return {**stored, "text": reply.text}


def _event(block: str) -> Any:
    """Return a server-sent event: {"event": …, "data": …}, or only the data where it has no name."""
    fields = dict(line.split(": ", 1) for line in block.strip().split("\n") if not line.startswith(":"))
    data = fields.get("data", "")
    value = masked(json.loads(data)) if data.startswith("{") else data
    return {"event": fields["event"], "data": value} if "event" in fields else value


def masked(value: Any, key: str = "") -> Any:
    """Return a value without ids, times and sizes."""
    if isinstance(value, dict):
        return {name: masked(one, name) for name, one in value.items()}
    if isinstance(value, list):
        return [masked(one, key) for one in value]
    if isinstance(value, str):
        return "TIME" if TIMES.fullmatch(key) else IDS.sub("ID", value)
    if isinstance(value, bool) or value is None:
        return value
    if TIMES.fullmatch(key) or key in SIZES:
        return "NUMBER"
    return round(value, 6) if isinstance(value, float) else value


def joined(events: list[Any]) -> list[Any]:
    """Return events of a stream; adjacent ones of the same form and sample become one."""
    kept: list[Any] = []
    for event in sorted(events, key=_sample):
        both = _join(kept[-1], event) if kept else None
        kept[-1:] = [event] if both is None and not kept else [both] if both is not None else [kept[-1], event]
    return kept


def _sample(event: Any) -> int:
    """Return the index of the sample an event is about: events of two samples alternate as the samples are computed."""
    if not isinstance(event, dict):
        return -1
    choices = event.get("choices")
    if choices is None:  # llama.cpp and SGLang have the index in the event itself
        return int(event.get("index", -1))
    return int(choices[0].get("index", 0)) if choices else 1000


def _join(first: Any, second: Any, key: str = "") -> Any:
    """Return two deltas as one, or None if the second one says something else than more of the same."""
    if key in COUNTED:
        return second
    if isinstance(first, dict) and isinstance(second, dict):
        if list(first) != list(second):
            return None
        both = {name: _join(first[name], second[name], name) for name in first}
        return None if any(both[name] is None and first[name] is not None for name in both) else both
    if key in JOINED and type(first) is type(second) and isinstance(first, str | list):
        return first + second
    if isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        many = [_join(one, other, key) for one, other in zip(first, second, strict=True)]
        return None if None in many else many
    return first if first == second else None


def differences(stored: Any, found: Any, place: str = "") -> list[str]:
    """Return a line for each difference; numbers may differ by `TOLERANCE`."""
    if isinstance(stored, dict) and isinstance(found, dict):
        pairs = [(f".{name}", stored.get(name, "MISSING"), found.get(name, "MISSING")) for name in {**stored, **found}]
    elif isinstance(stored, list) and isinstance(found, list) and len(stored) == len(found):
        pairs = [(f"[{i}]", *both) for i, both in enumerate(zip(stored, found, strict=True))]
    elif type(stored) in (int, float) and type(found) in (int, float):
        return [] if abs(stored - found) <= TOLERANCE * max(1, abs(stored)) else [f"{place}: {stored} is now {found}"]
    else:
        if isinstance(stored, str) and isinstance(found, str):
            stored, found = (FINGERPRINT.sub(r"\1-FACTS", one) for one in (stored, found))
        return [] if stored == found else [f"{place}: {stored!r} is now {found!r}"]
    return [line for name, one, other in pairs for line in differences(one, other, place + name)]
