"""rl-check: this server passes in both dialects; a proxy that breaks one property makes that check fail."""

from __future__ import annotations

import json
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

JSON = dict[str, Any]


@dataclass(frozen=True)
class Weights:
    model: Path
    vocab_size: int
    sets: list[str]
    """The options that name the sets of weights."""


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
    return Weights(root, config.vocab_size, options)


@pytest.fixture(scope="module")
def server(weights: Weights) -> Iterator[Running]:
    config = ServerConfig(port=0, log_requests=False, enable_rl=True, weights_dir=str(weights.model))
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


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_this_server_has_every_property(server: Running, weights: Weights, dialect: str) -> None:
    code, report = checked(server.url, weights, "--dialect", dialect)
    found = {row["check"]: row["result"] for row in report["checks"] if row["result"] != "pass"}
    assert found == {"sleep frees memory": "not offered", "adapters leave the base alone": "not offered"}, report
    assert (code, report["failed"]) == (0, 0)


# ---- broken servers -------------------------------------------------------------------------------------------------


@dataclass
class State:
    """What a fault remembers."""

    num_open: int = 0
    num_updates: int = 0
    is_stale: bool = False
    seen: set[str] = field(default_factory=set)


Change = Callable[[str, JSON, State], bool]
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


def values_by(off: Callable[[State], float]) -> Change:
    """Add to every sampled log-probability."""

    def change(path: str, reply: JSON, state: State) -> bool:
        for choice in reply.get("choices", ()):
            for entry in (choice["logprobs"] or {}).get("content") or ():
                entry["logprob"] += off(state)
        return False

    return change


def scores_by(off: Callable[[str, State], float]) -> Change:
    """Add to every score of a prompt."""

    def change(path: str, reply: JSON, state: State) -> bool:
        for entry in (reply.get("prompt_logprobs") or ())[1:]:
            for one in entry.values():
                one["logprob"] += off(json.dumps(sorted(entry)), state)
        return False

    return change


def choices_by(act: Callable[[list[JSON]], object]) -> Change:
    def change(path: str, reply: JSON, state: State) -> bool:
        if reply.get("choices"):
            act(reply["choices"])
        return False

    return change


def clone(choices: list[JSON]) -> None:
    for choice in choices[1:]:
        choice["token_ids"] = choices[0]["token_ids"]


def cut(choices: list[JSON], reason: str) -> None:
    for choice in choices:
        if choice["finish_reason"] == reason:
            choice["logprobs"]["content"] = choice["logprobs"]["content"][:-1]


def merged(path: str, body: JSON, state: State) -> bool:
    body["token_ids"] = body["token_ids"][::2] if "token_ids" in body else None
    return False


def marked(path: str, body: JSON, state: State) -> bool:
    """Remember updates and flushes."""
    if path == "/update_weights":
        state.num_updates, state.is_stale = state.num_updates + 1, True
    if path == "/reset_prefix_cache":
        state.is_stale = False
    return False


def hot(path: str, body: JSON, state: State) -> bool:
    body.get("sampling_params", {})["temperature"] = 1.0
    return False


def later(text: str, state: State) -> float:
    """Return 0 for the first reply with a text, then something."""
    is_known = text in state.seen
    state.seen.add(text)
    return 1e-4 if is_known else 0.0


def adapted(path: str, body: JSON, state: State) -> bool:
    body.pop("model", None)
    return "lora_adapter" in path


def shifted(choices: list[JSON]) -> None:
    for choice in choices:
        choice["logprobs"]["content"][0]["logprob"] = -5.0
        choice.pop("mask", None)


FAULTS: dict[str, tuple[Change, Change, str]] = {
    "seeds repeat": (without("seed"), nothing, "other tokens"),
    "batch invariance under load": (nothing, values_by(lambda state: 1e-6 * (state.num_open > 1)), "of 8 requests"),
    "group has no clones": (nothing, choices_by(clone), "different samples of 8"),
    "nucleus is normalised": (without("top_p"), nothing, "not renormalised"),
    "temperature is accounted for": (hot, nothing, "temperature 1"),
    "prompt scores survive prefix hits": (nothing, scores_by(later), "of 60 differ"),
    "prompt scores keep their order": (nothing, scores_by(lambda _, state: float(state.num_open > 1)), "another order"),
    "samples equal their scores": (nothing, values_by(lambda state: 0.01), "off by"),
    "ids are not retokenised": (merged, nothing, "the prompt changed"),
    "continuation equals whole": (hot, nothing, "greedy"),
    "abort returns the partial": (nothing, choices_by(lambda choices: cut(choices, "abort")), "values"),
    "pause keeps requests": (unsent("/pause"), nothing, "a new request ran"),
    "update drops stale kv": (marked, values_by(lambda state: 1e-4 * state.is_stale), "the cache of before"),
    "versions label every token": (
        nothing,
        choices_by(lambda choices: [one.pop("weight_versions") for one in choices]),
        "no version",
    ),
    "bad update changes nothing": (unsent("/update_weights"), nothing, "status 200 for NaN"),
    "stop token has a logprob": (nothing, choices_by(lambda choices: cut(choices, "stop")), "values"),
    "banned tokens leave the mass": (without("min_tokens"), nothing, "banned token"),
    "values are json numbers": (nothing, values_by(lambda state: float("nan")), "nan"),
    "streams equal whole replies": (
        nothing,
        choices_by(lambda choices: choices[0]["token_ids"].pop() if "usage" not in choices[0] else None),
        "streamed",
    ),
    "updates at once do not mix": (marked, values_by(lambda state: 1e-4 * (state.num_updates > 3)), "not those of one"),
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
                state.num_open += "token_ids" in body
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
                    state.num_open -= "token_ids" in body

        def do_GET(self) -> None:
            found = client.get(self.path)
            self.answer(found.status_code, found.content)

        def changed(self, found: JSON) -> JSON:
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


@pytest.mark.parametrize("check", FAULTS)
def test_broken_server_fails(server: Running, weights: Weights, check: str, tmp_path: Path) -> None:
    request, reply, text = FAULTS[check]
    with broken(server.url, request, reply) as url:
        code, report = checked(url, weights, "--only", check, "--adapter", str(tmp_path))
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
