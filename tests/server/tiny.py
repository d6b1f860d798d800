"""A tiny random model with a byte tokenizer and a chat template, served for tests on a real socket."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import tokenizers
import torch
import transformers

from nano_inference import EngineConfig
from nano_inference.core.admission import Limits
from nano_inference.server.app import App, guard_policy, installed_dialects
from nano_inference.server.config import ServerConfig
from nano_inference.server.dialect import Dialect
from nano_inference.server.engine_link import EngineLink, LoadedModel
from nano_inference.server.load import open_model
from nano_inference.server.model import ServedModel
from nano_inference.server.protocol import uvicorn_config
from nano_inference.server.run import Listener, bind
from nano_inference.server.security import KeyRing, load_keys
from nano_inference.text.dialogue import load_dialogue
from nano_inference.text.generation_config import chat_defaults
from nano_inference.text.grammar import Grammars
from nano_inference.text.kinds import TokenizerSource
from nano_inference.text.tokenizer import load_tokenizer

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NAME = "tiny"
MAX_LEN = 512


def make_tiny(
    directory: Path, positions: int = MAX_LEN, *, template: str = TEMPLATE, special: tuple[str, ...] = ()
) -> Path:
    """Write a random Llama with 256 byte tokens, four special tokens and those of `special`."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    core = tokenizers.Tokenizer(tokenizers.models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    core.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|bos|>", "<|pad|>", *special])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", bos_token="<|bos|>")
    fast.chat_template = template
    fast.save_pretrained(directory)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=260 + len(special),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        eos_token_id=257,
        bos_token_id=258,
        initializer_range=0.5,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 257}))
    return directory


def served_model(directory: Path, **fields: Any) -> ServedModel:
    """Return what the routes know of the tiny model, without an engine."""
    source = TokenizerSource(str(directory))
    tokenizer = load_tokenizer(source)
    usual: dict[str, Any] = {
        "names": ("tiny", "org/tiny-alias"), "any_name": False, "created": 1, "tokenizer": tokenizer,
        "dialogue": load_dialogue(source, tokenizer), "grammars": Grammars(tokenizer, 260, (257,)),
        "limits": Limits(vocab_size=260, max_model_len=MAX_LEN, num_blocks=100, block_size=16, hidden_size=32),
        "generation": {}, "chat_defaults": chat_defaults({}, {}), "longest_token": 12, "max_positions": MAX_LEN,
    }  # fmt: skip
    return ServedModel(**{**usual, **fields})


def opened(directory: Path, config: ServerConfig, **options: Any) -> LoadedModel:
    """Load the tiny model as `serve` does."""
    options = {"kv_cache_bytes": 8 << 20, "device": "cpu", "num_threads": 1} | options
    return open_model(EngineConfig(model_path=str(directory), **options), config, name=NAME, path=directory)


class StepBlocker:
    """Blocks an engine in the middle of an answer, so that commands of a test do not race with its end.

    While it is on, the engine runs `FREE_STEPS` turns after each new request, then one per command, except while a
    pause waits for running requests.
    """

    FREE_STEPS = 20

    def __init__(self, engine: Any, link: Any) -> None:
        self._engine, self._driver = engine, link.engine
        self._add, self._end_turn = engine.add, self._driver._run_watches
        self._num_free = 0
        self._is_off = threading.Event()
        self._is_off.set()
        engine.add, self._driver._run_watches = self.add, self.end_turn

    def put_on(self) -> None:
        """Block the engine after the next request's free steps."""
        self._num_free = self.FREE_STEPS
        self._is_off.clear()

    def take_off(self) -> None:
        """Unblock the engine."""
        self._is_off.set()

    def add(self, *given: Any, **named: Any) -> Any:
        """Add a request and reset the free steps."""
        self._num_free = self.FREE_STEPS
        return self._add(*given, **named)

    def end_turn(self) -> None:
        """End a turn; wait while no free step or command allows the next one."""
        self._end_turn()
        self._num_free -= 1
        engine = self._engine
        while self._num_free <= 0 and engine.has_pending() and not engine.is_pausing and not self._driver.num_commands:
            if self._is_off.wait(0.001):
                break


@dataclass
class Running:
    """A server on a real socket, in a separate thread."""

    url: str
    app: App
    link: EngineLink
    loop: asyncio.AbstractEventLoop
    opened: LoadedModel
    listener: Listener
    client: httpx2.Client = field(init=False)
    blocker: StepBlocker = field(init=False)

    def __post_init__(self) -> None:
        self.blocker = StepBlocker(self.opened.engine, self.link)
        # To read the certificates of https, which no server here speaks, takes longer than a test.
        self.client = httpx2.Client(base_url=self.url, timeout=60, verify=False)

    def post(self, path: str, body: Any, **headers: str) -> httpx2.Response:
        """POST JSON."""
        return self.client.post(path, json=body, headers=headers)

    def events(self, path: str, body: Any) -> list[Any]:
        """POST JSON and return the streamed events, [DONE] as a string."""
        with self.client.stream("POST", path, json=body) as response:
            assert response.status_code == 200, response.read()
            text = b"".join(response.iter_bytes()).decode()
        return events_in(text)

    def lines(self, path: str, body: Any) -> list[Any]:
        """POST JSON and return the values of a stream of JSON lines."""
        reply = self.post(path, body)
        assert reply.status_code == 200, reply.text
        assert reply.headers["content-type"] == "application/x-ndjson"
        return [json.loads(line) for line in reply.text.splitlines()]

    def comes_to_show(self, line: str) -> bool:
        """Return True once /metrics contains a line, False after a minute; metrics change after a turn's commands."""
        deadline = time.monotonic() + 60
        while line not in self.client.get("/metrics").text.splitlines():
            if time.monotonic() > deadline:
                return False
        return True

    def on_loop(self, work: Any) -> Any:
        """Return `work()`, run on the server's event loop."""

        async def call() -> Any:
            return work()

        return asyncio.run_coroutine_threadsafe(call(), self.loop).result(30)

    def on_engine(self, work: Any) -> Any:
        """Return `work()`, run on the engine's thread between two steps."""
        return asyncio.run_coroutine_threadsafe(self.link.engine.call(lambda _: work()), self.loop).result(30)


def events_in(text: str) -> list[Any]:
    """Return the data of server-sent events."""
    data = [block.removeprefix("data: ") for block in text.split("\n\n") if block.startswith("data: ")]
    return [one if one == "[DONE]" else json.loads(one) for one in data]


async def close(listener: Listener, serving: asyncio.Task[None]) -> None:
    """Do what `Listener.shutdown` does when nothing is left to wait for, without its pauses of a tenth of a second."""
    for server in listener.servers:
        server.close()
    state = listener.server_state
    for connection in tuple(state.connections):
        connection.shutdown()
    while state.connections or state.tasks:
        await asyncio.sleep(0.001)
    serving.cancel()
    with suppress(asyncio.CancelledError):
        await serving


@contextmanager
def running(
    directory: Path,
    config: ServerConfig | None = None,
    make: Any = opened,
    dialects: Mapping[str, Dialect] | None = None,
    **options: Any,
) -> Iterator[Running]:
    """Serve the tiny model on 127.0.0.1 while the block runs, by default with all dialects; `make` loads it."""
    config = config or ServerConfig(port=0, log_requests=False)
    listening = bind(config)
    ready: list[Running] = []
    came_up, leave = threading.Event(), threading.Event()
    failures: list[BaseException] = []

    async def main() -> None:
        link = EngineLink(step_timeout=config.step_timeout)
        keys = KeyRing.of(load_keys(config), is_shared=config.share_prefix_cache)
        table = installed_dialects() if dialects is None else dialects
        app = App(config, guard_policy(config, keys), link, table)
        listener = Listener(uvicorn_config(app.asgi, config))
        serving = asyncio.create_task(listener.serve(sockets=[listening]))
        loaded = await link.start(lambda: make(directory, config, **options))
        app.serve(loaded, options.get("max_batch_size", 256))
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        ready.append(Running(url, app, link, asyncio.get_running_loop(), loaded, listener))
        came_up.set()
        await asyncio.to_thread(leave.wait)
        link.abort_all()
        await close(listener, serving)
        await link.stop()
        app.close()

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            failures.append(error)
        finally:
            came_up.set()

    thread = threading.Thread(target=run, name="server")
    thread.start()
    came_up.wait()
    if not ready:
        thread.join()
        raise failures[0]
    try:
        yield ready[0]
    finally:
        ready[0].client.close()
        leave.set()
        thread.join(60)
    if failures:
        raise failures[0]
