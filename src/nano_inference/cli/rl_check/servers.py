"""A rollout server as `rl-check` sees it: token ids in, samples out, in vLLM's or SGLang's dialect."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx2

JSON = dict[str, Any]
Scores = list[float | None]
ABSENT = (404, 405, 501)
"""Statuses of a route that a server does not have."""


class NotOffered(Exception):
    """The server has no such request, or an option that the check needs was left out."""

    result = "not offered"


class Failed(Exception):
    """The server does not have the property; the text says what came back."""

    result = "FAIL"


@dataclass(frozen=True)
class Sample:
    """One sample of a reply, or a part of it."""

    ids: tuple[int, ...]
    logprobs: tuple[Any, ...]
    tops: tuple[Mapping[int, float], ...] = ()  # the most probable tokens at each position, if they were requested
    reason: str | None = None
    spans: tuple[Mapping[str, Any], ...] = ()  # versions of the weights by range of tokens; () if not reported
    mask: tuple[int, ...] = ()  # 0 for tokens that were not sampled; () if not reported


@dataclass(frozen=True)
class Dialect:
    """The paths, bodies and replies of one kind of server."""

    path: str  # of generation
    body: Callable[[Sequence[int], str, int, JSON], JSON]  # ids, name, number of alternatives, vLLM's parameters
    samples: Callable[[Any], list[tuple[int, Sample]]]  # a reply or an event, to (index, sample)
    is_cumulative: bool  # whether each event of a stream has all tokens so far
    routes: Mapping[str, Callable[..., tuple[str, JSON]]]  # action -> path and body
    version: str  # path that reports the version of the weights


class Server:
    """Owns the connections to a server."""

    def __init__(self, url: str, key: str | None, dialect: Dialect) -> None:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        limits = httpx2.Limits(max_connections=None)
        self._client = httpx2.Client(base_url=url.rstrip("/"), headers=headers, timeout=300, limits=limits)
        self._dialect = dialect

    def generate(self, ids: Sequence[int], *, name: str = "", top: int = 0, **params: Any) -> list[Sample]:
        """Return n samples; parameters have vLLM's names. Raises `NotOffered`, `Failed`."""
        reply = self._ask(self._dialect.path, self._dialect.body(ids, name, top, params))
        return [sample for _, sample in self._dialect.samples(reply)]

    def stream(self, ids: Sequence[int], **params: Any) -> list[Sample]:
        """Return n samples, joined from a stream."""
        parts: dict[int, list[Sample]] = {}
        for event in self._events({**self._dialect.body(ids, "", 0, params), "stream": True}):
            for index, sample in self._dialect.samples(event):
                parts.setdefault(index, []).append(sample)
        if self._dialect.is_cumulative:
            return [parts[index][-1] for index in sorted(parts)]
        return [_joined(parts[index]) for index in sorted(parts)]

    def scores(self, texts: Sequence[Sequence[int]]) -> list[Scores]:
        """Return the log-probability of each token of each text; None for the first."""
        if self._dialect is SGLANG:
            params = {"max_new_tokens": 1}
            body = {"input_ids": list(map(list, texts)), "sampling_params": params, "return_logprob": True}
            reply = self._ask("/generate", {**body, "logprob_start_len": 0})
            return [[entry[0] for entry in one["meta_info"]["input_token_logprobs"]] for one in reply]

        def one(ids: Sequence[int]) -> Scores:
            body = self._dialect.body(ids, "", 0, {"max_tokens": 1, "prompt_logprobs": 0})
            entries = self._ask(self._dialect.path, body)["prompt_logprobs"]
            pairs = zip(ids, entries, strict=False)  # another number of entries is for a check to find
            return [None if entry is None else entry.get(str(token), {}).get("logprob") for token, entry in pairs]

        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(one, texts))

    def version(self) -> Any:
        """Return what the server says of its weights."""
        return json.loads(_offered(self._client.get(self._dialect.version)).text)

    def act(self, action: str, *arguments: str) -> tuple[int, str]:
        """Send one of `Dialect.routes`; return status and text. Raises `NotOffered`."""
        path, body = self._dialect.routes[action](*arguments)
        reply = _offered(self._client.post(path, json=body), None)
        return reply.status_code, reply.text

    def close(self) -> None:
        self._client.close()

    def _ask(self, path: str, body: JSON) -> Any:
        return json.loads(_offered(self._client.post(path, json=body)).text)

    def _events(self, body: JSON) -> Iterator[JSON]:
        with self._client.stream("POST", self._dialect.path, json=body) as reply:
            if reply.status_code != 200:
                reply.read()
            for line in _offered(reply).iter_lines():
                if line.startswith("data: {"):
                    yield json.loads(line.removeprefix("data: "))


def _offered(reply: httpx2.Response, expected: int | None = 200) -> httpx2.Response:
    """Return a reply. Raises `NotOffered` for an unknown route, and `Failed` for another status than expected."""
    if reply.status_code in ABSENT:
        raise NotOffered(f"{reply.url.path}: status {reply.status_code}")
    if expected not in (None, reply.status_code):
        raise Failed(f"{reply.url.path}: status {reply.status_code}: {reply.text[:200]}")
    return reply


def _joined(parts: Sequence[Sample]) -> Sample:
    ids = tuple(token for one in parts for token in one.ids)
    return Sample(ids, tuple(value for one in parts for value in one.logprobs), reason=parts[-1].reason)


def _vllm_body(ids: Sequence[int], name: str, top: int, params: JSON) -> JSON:
    params = {"max_tokens": 24, "logprobs": top, **params}
    more: JSON = {"request_id": name} if name else {}
    if "adapter" in params:
        more["model"] = params.pop("adapter")
    return {"token_ids": list(ids), "sampling_params": params, **more}


def _vllm_samples(reply: JSON) -> list[tuple[int, Sample]]:
    found = []
    for choice in reply["choices"]:
        entries = (choice.get("logprobs") or {}).get("content") or []
        sample = Sample(
            tuple(choice.get("token_ids") or ()),
            tuple(entry["logprob"] for entry in entries),
            tuple({_token_of(one): one["logprob"] for one in entry["top_logprobs"]} for entry in entries),
            choice.get("finish_reason"),
            tuple(choice.get("weight_versions") or ()),
            tuple(choice.get("mask") or ()),
        )
        found.append((choice["index"], sample))
    return found


def _token_of(entry: JSON) -> int:
    """Return an entry's id; vLLM has it in the text alone, as "token_id:7"."""
    return int(entry["token_id"] if "token_id" in entry else str(entry["token"]).removeprefix("token_id:"))


def _sglang_body(ids: Sequence[int], name: str, top: int, params: JSON) -> JSON:
    params = {"max_tokens": 24, **params}
    more: JSON = {"rid": name} if name else {}
    if "adapter" in params:
        more["lora_path"] = params.pop("adapter")
    params |= params.pop("structured_outputs", {})
    names = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}
    known = {names.get(field, field): value for field, value in params.items()}
    return {"input_ids": list(ids), "sampling_params": known, "return_logprob": True, "top_logprobs_num": top, **more}


def _sglang_samples(reply: Any) -> list[tuple[int, Sample]]:
    found = []
    for place, one in enumerate(reply if isinstance(reply, list) else [reply]):
        meta = one["meta_info"]
        sample = Sample(
            tuple(one["output_ids"]),
            tuple(entry[0] for entry in meta.get("output_token_logprobs") or ()),
            tuple({token: value for value, token, _ in entry} for entry in meta.get("output_top_logprobs") or ()),
            (meta["finish_reason"] or {}).get("type"),
            tuple(meta.get("weight_versions") or ()),
            tuple(meta.get("mask") or ()),
        )
        found.append((one.get("index", place), sample))
    return found


VLLM = Dialect(
    path="/inference/v1/generate",
    body=_vllm_body,
    samples=_vllm_samples,
    is_cumulative=False,
    routes={
        "update": lambda where, label: ("/update_weights", {"weight_dir": where, "weight_version": label}),
        "pause": lambda: ("/pause?mode=keep&clear_cache=false", {}),
        "resume": lambda: ("/resume", {}),
        "abort": lambda name: ("/abort_requests", {"request_ids": [name]}),
        "flush": lambda: ("/reset_prefix_cache", {}),
        "sleep": lambda: ("/sleep?level=1", {}),
        "wake": lambda: ("/wake_up", {}),
        "load adapter": lambda name, where: ("/v1/load_lora_adapter", {"lora_name": name, "lora_path": where}),
        "unload adapter": lambda name: ("/v1/unload_lora_adapter", {"lora_name": name}),
    },
    version="/weight_info",
)
SGLANG = Dialect(
    path="/generate",
    body=_sglang_body,
    samples=_sglang_samples,
    is_cumulative=True,
    routes={
        "update": lambda where, label: ("/update_weights_from_disk", {"model_path": where, "weight_version": label}),
        "pause": lambda: ("/pause_generation", {"mode": "in_place"}),
        "resume": lambda: ("/continue_generation", {}),
        "abort": lambda name: ("/abort_request", {"rid": name}),
        "flush": lambda: ("/flush_cache", {}),
        "sleep": lambda: ("/release_memory_occupation", {}),
        "wake": lambda: ("/resume_memory_occupation", {}),
        "load adapter": lambda name, where: ("/load_lora_adapter", {"lora_name": name, "lora_path": where}),
        "unload adapter": lambda name: ("/unload_lora_adapter", {"lora_name": name}),
    },
    version="/get_model_info",
)
DIALECTS = {"vllm": VLLM, "sglang": SGLANG}
