"""Stand-in for `tests/utils.py` of vLLM's sources: starts `nano-inference serve` where the tests start vLLM.

The environment has NANO_MODEL, NANO_CONTEXT (the longest context) and NANO_SCALE (tokens for one of vLLM's model).
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import anthropic
import httpx
import openai

ROCM_ENV_OVERRIDES: dict[str, str] = {}
ROCM_EXTRA_ARGS: list[str] = []
START_S = 300.0
_SAME = (
    *("--served-model-name", "--max-logprobs", "--uds", "--root-path", "--api-key"),
    *("--enable-per-request-metrics", "--enable-force-include-usage", "--return-tokens-as-token-ids"),
)
"""Options that both servers have."""


def options(given: Sequence[str]) -> list[str]:
    """Return `serve`'s options for vLLM's; those about its kernels, parsers and adapters have no counterpart."""
    out: list[str] = []
    for name, values in _named(given):
        if name in _SAME:
            out += [word for value in values for word in (name, value)] or [name]
        elif name == "--chat-template":
            out += ["--chat-template-file" if Path(values[0]).exists() else name, values[0]]
        elif name == "--max-model-len":
            scaled = int(values[0]) * int(os.environ["NANO_SCALE"])
            out += [name, str(min(scaled, int(os.environ["NANO_CONTEXT"])))]
        elif name == "--max-num-seqs":
            out += ["--max-batch-size", values[0]]
    return out


def _named(given: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return each option with its values."""
    found: list[tuple[str, list[str]]] = []
    for word in given:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            found.append((name, [value] if equals else []))
        else:
            found[-1][1].append(word)
    return found


class RemoteOpenAIServer:
    """A server process, with the clients that the tests ask for."""

    DUMMY_API_KEY = "token-abc123"
    show_hidden_metrics = False

    def __init__(self, model: str, args: Sequence[Any], *, env_dict: dict[str, str] | None = None, **_: object) -> None:
        words = [str(word) for word in args]
        named = dict(_named(words))
        self.uds = next(iter(named.get("--uds", [])), None)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.host, self.port = "127.0.0.1", int(next(iter(named.get("--port", [])), free.getsockname()[1]))
        command = [sys.executable, "-m", "nano_inference", "serve", "--model", os.environ["NANO_MODEL"]]
        # vLLM's cache has whole blocks of 16 tokens
        command += ["--cache-type", "paged", "--block-size", "16", "--seed", "0", "--insecure", "--no-log-requests"]
        command += options(words)
        command += [] if "--served-model-name" in named else ["--served-model-name", str(model)]
        command += ["--api-key", env_dict["VLLM_API_KEY"]] if env_dict and "VLLM_API_KEY" in env_dict else []
        self.process = subprocess.Popen([*command, *([] if self.uds else ["--port", str(self.port)])])
        self._wait()

    def _wait(self) -> None:
        """Return once the server answers."""
        transport = httpx.HTTPTransport(uds=self.uds) if self.uds else None
        end = time.monotonic() + START_S
        with httpx.Client(transport=transport) as client:
            while time.monotonic() < end and self.process.poll() is None:
                with suppress(httpx.TransportError):
                    if client.get(self.url_for("health")).status_code == 200:
                        return
                time.sleep(0.2)
        self.process.kill()
        raise RuntimeError("the server did not start")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()

    @property
    def url_root(self) -> str:
        """URL without a path."""
        return f"http://{Path(self.uds).name}" if self.uds else f"http://{self.host}:{self.port}"

    def url_for(self, *parts: str) -> str:
        """Return the URL of a path."""
        return "/".join([self.url_root, *(part.strip("/") for part in parts if part)])

    def _opened(self, client: Callable[..., Any], path: str, given: dict[str, Any]) -> Any:
        access = {"base_url": self.url_for(path), "api_key": self.DUMMY_API_KEY, "max_retries": 0, "timeout": 600}
        return client(**{**access, **given})

    def get_client(self, **given: Any) -> Any:
        return self._opened(openai.OpenAI, "v1", given)

    def get_async_client(self, **given: Any) -> Any:
        return self._opened(openai.AsyncOpenAI, "v1", given)

    def get_client_anthropic(self, **given: Any) -> Any:
        return self._opened(anthropic.Anthropic, "", given)

    def get_async_client_anthropic(self, **given: Any) -> Any:
        return self._opened(anthropic.AsyncAnthropic, "", given)


RemoteVLLMServer = RemoteOpenAIServer


def __getattr__(name: str) -> Callable[..., Any]:
    """Return a decorator without effect for any other name: the tests import marks of GPUs from here."""
    if name.startswith("__"):
        raise AttributeError(name)
    return lambda *_, **__: lambda function: function
