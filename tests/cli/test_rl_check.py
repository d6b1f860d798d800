"""rl-check: this server passes in both dialects; a proxy that breaks one property makes that check fail."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
import transformers
from safetensors.torch import save_file

from nano_inference.cli.app import main
from nano_inference.server.config import ServerConfig
from tests.server.tiny import Running, make_tiny, running
from tests.server.trainer import make_adapter

JSON = dict[str, Any]


@dataclass(frozen=True)
class Weights:
    model: Path
    vocab_size: int
    sets: list[str]
    """The options that name the sets of weights."""
    adapter: Path


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    root = tmp_path_factory.mktemp("rl_check")
    make_tiny(root / "model")
    config = transformers.AutoConfig.from_pretrained(root / "model")
    options = []
    for name, seed in (("a", 0), ("b", 1), ("bad", 1)):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config)
        tensors = {key: value.detach().clone() for key, value in model.named_parameters()}
        if name == "bad":
            tensors["model.norm.weight"][3] = torch.nan
        (root / name).mkdir()
        save_file(tensors, root / name / "model.safetensors")
        options += [f"--{name}", str(root / name)]
    return Weights(root, config.vocab_size, options, make_adapter(root / "adapter", 1))


@pytest.fixture(scope="module")
def server(weights: Weights) -> Iterator[Running]:
    config = ServerConfig(port=0, log_requests=False, enable_rl=True, enable_lora=True, weights_dir=str(weights.model))
    with running(weights.model / "model", config) as one:
        yield one


def checked(url: str, weights: Weights, *options: str) -> tuple[int, JSON]:
    """Return the command's exit code and its JSON."""
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builtins.print", lambda *values, **_: lines.append(" ".join(map(str, values))))
        code = main(
            ["rl-check", url, "--vocab", str(weights.vocab_size), *weights.sets, "--json", "--long", "300", *options]
        )
    return code, json.loads(lines[-1])


@pytest.mark.slow
@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_this_server_has_every_property(server: Running, weights: Weights, dialect: str) -> None:
    code, report = checked(
        server.url, weights, "--dialect", dialect, "--pid", str(os.getpid()), "--adapter", str(weights.adapter)
    )
    assert {row["result"] for row in report["checks"]} == {"pass"}, report
    assert (code, report["failed"]) == (0, 0)


# ---- broken servers -------------------------------------------------------------------------------------------------


@dataclass
class State:
    """What a fault remembers."""

    num_open: int = 0
    num_updates: int = 0
    is_stale: bool = False
    is_stream: bool = False
    seen: set[str] = field(default_factory=set)


Change = Callable[[str, Any, State], bool]
"""Changes a request's body, or a reply's JSON, in place; a request for which True is returned is not sent on."""


def nothing(path: str, body: JSON, state: State) -> bool:
    return False


def without(*names: str) -> Change:
    def change(path: str, body: JSON, state: State) -> bool:
        for name in names:
            body.get("sampling_params", {}).pop(name, None)
        return False

    return change


def unsent(*paths: str) -> Change:
    return lambda path, body, state: path.startswith(paths)


@dataclass(frozen=True)
class Choice:
    """A sample of a reply, in either dialect."""

    whole: JSON  # has its ids
    more: JSON  # has the rest
    ids: list[int]
    entries: list[Any]  # one for each id

    @property
    def reason(self) -> str | None:
        found = self.more["finish_reason"]
        return found["type"] if isinstance(found, dict) else found


def choices_of(reply: Any) -> list[Choice]:
    if isinstance(reply, dict) and "choices" in reply:
        each = reply["choices"]
        return [Choice(one, one, one["token_ids"], (one["logprobs"] or {}).get("content") or []) for one in each]
    found = [one for one in (reply if isinstance(reply, list) else [reply]) if "output_ids" in one]
    metas = [one["meta_info"] for one in found]
    return [
        Choice(one, meta, one["output_ids"], meta.get("output_token_logprobs") or [])
        for one, meta in zip(found, metas, strict=True)
    ]


def choices_by(act: Callable[[list[Choice], State], object]) -> Change:
    def change(path: str, reply: Any, state: State) -> bool:
        found = choices_of(reply)
        if found:
            act(found, state)
        return False

    return change


def add(entry: Any, off: float) -> None:
    entry["logprob" if isinstance(entry, dict) else 0] += off


def values_by(off: Callable[[State], float]) -> Change:
    """Add to every sampled log-probability."""
    return choices_by(lambda found, state: [add(entry, off(state)) for one in found for entry in one.entries])


def scores_by(off: Callable[[str, State, int], float]) -> Change:
    """Add to every score of a prompt, by its id, and the number of texts in the reply."""

    def change(path: str, reply: Any, state: State) -> bool:
        if isinstance(reply, dict) and reply.get("prompt_logprobs"):
            for entry in reply["prompt_logprobs"][1:]:
                for one in entry.values():
                    add(one, off(json.dumps(sorted(entry)), state, 1))
        for choice in choices_of(reply):
            for entry in (choice.more.get("input_token_logprobs") or ())[1:]:
                add(entry, off(str(entry[1]), state, len(reply)))
        return False

    return change


def clone(found: list[Choice], state: State) -> None:
    for one in found[1:]:
        one.ids[:] = found[0].ids


def cut(reason: str) -> Callable[[list[Choice], State], None]:
    """Drop the last value of samples that ended for that reason."""
    return lambda found, state: [one.entries.pop() for one in found if one.reason == reason and one.entries] and None


def merged(path: str, body: JSON, state: State) -> bool:
    """Drop every second id."""
    for name in {"token_ids", "input_ids"} & body.keys():
        is_list = isinstance(body[name][0], list)
        body[name] = [ids[::2] for ids in body[name]] if is_list else body[name][::2]
    return False


def marked(path: str, body: JSON, state: State) -> bool:
    """Remember updates, flushes and streams."""
    if path.startswith("/update_weights"):
        state.num_updates, state.is_stale = state.num_updates + 1, True
    if path in ("/reset_prefix_cache", "/flush_cache"):
        state.is_stale = False
    state.is_stream = "stream" in body
    return False


def hot(path: str, body: JSON, state: State) -> bool:
    body.get("sampling_params", {})["temperature"] = 1.0
    return False


def later(text: str, state: State, count: int) -> float:
    """Return 0 for the first reply with a text, then something."""
    is_known = text in state.seen
    state.seen.add(text)
    return 1e-4 if is_known else 0.0


def adapted(path: str, body: JSON, state: State) -> bool:
    body.pop("model", None)
    body.pop("lora_path", None)
    return "lora_adapter" in path


def shifted(found: list[Choice], state: State) -> None:
    for one in found:
        add(one.entries[0], -5.0)
        one.more.pop("mask", None)


def shortened(found: list[Choice], state: State) -> None:
    if state.is_stream:
        found[0].ids.pop()


FAULTS: dict[str, tuple[Change, Change, str]] = {
    "seeds repeat": (without("seed", "sampling_seed"), nothing, "other tokens"),
    "batch invariance under load": (nothing, values_by(lambda state: 1e-6 * (state.num_open > 1)), "of 8 requests"),
    "group has no clones": (nothing, choices_by(clone), "different samples of 8"),
    "nucleus is normalised": (without("top_p"), nothing, "not renormalised"),
    "temperature is accounted for": (hot, nothing, "temperature 1"),
    "prompt scores survive prefix hits": (nothing, scores_by(later), "of 60 differ"),
    "prompt scores keep their order": (
        nothing,
        scores_by(lambda _, state, count: float(state.num_open > 1 or count > 1)),
        "another order",
    ),
    "samples equal their scores": (nothing, values_by(lambda state: 0.01), "off by"),
    "ids are not retokenised": (merged, nothing, "the prompt changed"),
    "continuation equals whole": (hot, nothing, "greedy"),
    "abort returns the partial": (nothing, choices_by(cut("abort")), "values"),
    "pause keeps requests": (unsent("/pause"), nothing, "a new request ran"),
    "update drops stale kv": (marked, values_by(lambda state: 1e-4 * state.is_stale), "the cache of before"),
    "versions label every token": (
        nothing,
        choices_by(lambda found, state: [one.more.pop("weight_versions", None) for one in found]),
        "no version",
    ),
    "bad update changes nothing": (unsent("/update_weights"), nothing, "status 200 for NaN"),
    "stop token has a logprob": (nothing, choices_by(cut("stop")), "values"),
    "banned tokens leave the mass": (without("min_tokens", "min_new_tokens"), nothing, "banned token"),
    "values are json numbers": (nothing, values_by(lambda state: float("nan")), "nan"),
    "sleep frees memory": (
        unsent("/sleep", "/wake_up", "/release_memory_occupation", "/resume_memory_occupation"),
        nothing,
        "MiB asleep",
    ),
    "streams equal whole replies": (marked, choices_by(shortened), "streamed"),
    "updates at once do not mix": (
        marked,
        values_by(lambda state: 1e-4 * (state.num_updates > 3)),
        "of one set: False",
    ),
    "forced tokens cost nothing": (nothing, choices_by(shifted), "without a choice"),
    "adapters leave the base alone": (adapted, nothing, "no effect"),
}


@contextmanager
def broken(target: str, request: Change, reply: Change) -> Iterator[str]:
    """Serve a proxy that changes requests and replies."""
    state, lock = State(), threading.Lock()
    client = httpx2.Client(base_url=target, timeout=60)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with lock:
                is_answer = bool({"token_ids", "input_ids"} & body.keys())
                state.num_open += is_answer
                is_unsent = request(self.path, body, state)
            try:
                if is_unsent:
                    return self.answer(200, b"{}")
                found = client.post(self.path, json=body)
                if found.headers["content-type"].startswith("application/json"):
                    return self.answer(found.status_code, json.dumps(self.changed(found.json())).encode())
                events = found.text.split("\n\n")
                data = [
                    f"data: {json.dumps(self.changed(json.loads(one[6:])))}" if one.startswith("data: {") else one
                    for one in events
                ]
                self.answer(found.status_code, "\n\n".join(data).encode(), "text/event-stream")
            finally:
                with lock:
                    state.num_open -= is_answer

        def do_GET(self) -> None:
            found = client.get(self.path)
            self.answer(found.status_code, found.content)

        def changed(self, found: Any) -> Any:
            with lock:
                reply(self.path, found, state)
            return found

        def answer(self, status: int, data: bytes, kind: str = "application/json") -> None:
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None: ...

    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=proxy.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{proxy.server_address[1]}"
    finally:
        proxy.shutdown()
        thread.join()
        proxy.server_close()
        client.close()


@pytest.fixture
def idle() -> Iterator[int]:
    """The id of a process whose memory does not change."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process.pid
        process.kill()


@pytest.mark.parametrize("dialect", ["vllm", pytest.param("sglang", marks=pytest.mark.slow)])
@pytest.mark.parametrize("check", FAULTS)
def test_broken_server_fails(
    server: Running, weights: Weights, check: str, dialect: str, idle: int, tmp_path: Path
) -> None:
    request, reply, text = FAULTS[check]
    options = ["--dialect", dialect, "--only", check, "--adapter", str(tmp_path), "--pid", str(idle)]
    with broken(server.url, request, reply) as url:
        code, report = checked(url, weights, *options)
    (row,) = report["checks"]
    assert (code, row["result"]) == (1, "FAIL") and text in row["note"], row


def test_tolerance_says_not_bitwise(server: Running, weights: Weights) -> None:
    _, reply, _ = FAULTS["batch invariance under load"]
    with broken(server.url, nothing, reply) as url:
        code, report = checked(url, weights, "--only", "batch invariance", "--tolerance", "1e-4")
    assert code == 0 and report["checks"][0]["note"].startswith("not bitwise")


def test_server_out_of_reach_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rl-check", "http://127.0.0.1:9", "--vocab", "32"]) == 2
    assert capsys.readouterr().err.startswith("nano-inference: URL: http://127.0.0.1:9")
