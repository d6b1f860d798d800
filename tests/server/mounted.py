"""Serves the tiny model with further or replaced routes; helpers of the dialects' tests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from nano_inference import InferenceEngine, SamplingParams
from nano_inference.server.app import installed_dialects
from nano_inference.server.config import ServerConfig
from nano_inference.server.dialect import Converting, Dialect, Route
from nano_inference.text.fast import BYTE_OF_CHAR
from nano_inference.types import TrainingSample
from tests.server.tiny import Running, running

JSON = dict[str, Any]
T = TypeVar("T")
END_TOKEN = 257
BYTES = tuple(BYTE_OF_CHAR[char] for char in sorted(BYTE_OF_CHAR))
"""Bytes of the tiny model's first 256 tokens."""
ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "/completions": "/completion",
        "/embeddings": "/v1/embeddings",
        "/responses": "/v1/responses",
        "/chat/completions/input_tokens": "/v1/chat/completions/input_tokens",
    }
)
"""Path -> another path with the same body and the same replies."""
NANOCHATS: Route = replace(
    next(one for one in installed_dialects()["nanochat"].generating if one.path == "/chat/completions"), choose=None
)
"""The route of nanochat's web chat, also for models that are not nanochat's."""
_ROUTES = tuple(one for row in installed_dialects().values() for one in row.generating)
GENERATING: tuple[Route, ...] = tuple(one for one in _ROUTES if one.path not in ALIASES)
CONVERTING: tuple[Converting, ...] = tuple(
    one for row in installed_dialects().values() for one in row.converting if one.path not in ALIASES
)


def ids(text: str) -> list[int]:
    return [BYTES.index(byte) for byte in text.encode()]


def written(tokens: Sequence[int]) -> str:
    """Return the text of tokens without special ones."""
    return bytes(BYTES[token] for token in tokens if token < 256).decode("utf-8", "replace")


@contextmanager
def mounted(directory: Path, *routes: Route, config: ServerConfig | None = None, **options: Any) -> Iterator[Running]:
    """Serve the tiny model with these routes added; they replace routes of the same path."""
    given = {one.path: one for one in routes}
    dialects = {
        name: replace(dialect, generating=tuple(given.pop(one.path, one) for one in dialect.generating))
        for name, dialect in installed_dialects().items()
    }
    with running(
        directory, config, dialects={**dialects, "more": Dialect(generating=tuple(given.values()))}, **options
    ) as server:
        yield server


def engine_sample(engine: InferenceEngine, prompt: Sequence[int], **fields: Any) -> TrainingSample:
    """Return the engine's sample; greedy by default."""
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 12, "logprobs_mode": "raw", **fields})
    return engine.generate([list(prompt)], params)[0]


def ended_after(server: Running, num_steps: int, request: Callable[[], T]) -> T:
    """Send a request in a thread, end all requests after `num_steps` engine steps, and return the reply."""
    engine = server.opened.engine
    num_turns = 0
    reached, resume = threading.Event(), threading.Event()

    def count() -> bool | None:
        nonlocal num_turns
        num_turns += engine.has_pending()
        if num_turns < num_steps:
            return None
        reached.set()
        assert resume.wait(60)
        return True

    asyncio.run_coroutine_threadsafe(server.link.engine.watch(lambda _: count()), server.loop).result(60)
    try:
        with ThreadPoolExecutor(1) as pool:
            reply = pool.submit(request)
            assert reached.wait(60)
            ending = asyncio.run_coroutine_threadsafe(server.link.end_requests(), server.loop)
            server.on_loop(lambda: None)  # now the engine's thread has it in its queue
            resume.set()
            assert ending.result(60) > 0
            return reply.result(60)
    finally:
        resume.set()
