"""A server with vLLM's routes for sampling and none of this project's extensions, on an engine in this process.

The forms are those of vLLM's `vllm/entrypoints/serve/disagg`: a token's id is in its text alone, the sampled token is
the first of those that are listed as most probable, a request samples at least one token. Each event of a stream has
line separators in a text, which vLLM sends as they are.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from nano_inference import InferenceEngine, SamplingParams, TrainingSample

JSON = dict[str, Any]
_TAKEN = {
    *("n", "seed", "temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "presence_penalty"),
    *("frequency_penalty", "repetition_penalty", "ignore_eos", "logprobs", "prompt_logprobs", "stop_token_ids"),
}
"""Fields of `sampling_params` that this server takes; vLLM takes more of its own."""


@dataclass
class Stub:
    """A running server."""

    url: str
    asked: list[tuple[str, JSON]] = field(default_factory=list)
    """Path and body of each POST request."""


@contextmanager
def vllm_stub(engine: InferenceEngine) -> Iterator[Stub]:
    """Serve an engine while the block runs; requests run one at a time."""
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if self.path == "/health":
                self._send(200, b"")
            elif self.path == "/v1/models":
                self._reply(200, {"object": "list", "data": [{"id": "m", "object": "model"}]})
            else:
                self._reply(404, {"detail": "Not Found"})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            stub.asked.append((self.path, body))
            if self.path == "/inference/v1/generate":
                self._generate(body)

            else:
                self._reply(404, {"detail": "Not Found"})

        def _generate(self, body: JSON) -> None:
            given = body["sampling_params"]
            if given["max_tokens"] < 1:
                self._refuse(f"max_tokens must be at least 1, got {given['max_tokens']}.")
                return
            if unknown := given.keys() - _TAKEN:
                self._refuse(f"Extra inputs are not permitted: {', '.join(sorted(unknown))}")
                return
            params = SamplingParams(**{name: value for name, value in given.items() if name != "n"})
            samples = self._samples(body["token_ids"], params, given["n"])
            if body.get("stream"):
                self._stream([chunk for sample in samples for chunk in _chunks(sample)])
                return
            choices = [_choice(sample, 0, len(sample.completion_tokens)) for sample in samples]
            prompt = _prompt_logprobs(samples[0])
            self._reply(200, {"request_id": body["request_id"], "choices": choices, "prompt_logprobs": prompt})

        def _samples(self, prompt: Sequence[int], params: SamplingParams, count: int) -> list[TrainingSample]:
            with lock:
                return engine.generate([prompt], params, count)

        def _stream(self, chunks: list[JSON]) -> None:
            values = [{"choices": [chunk], "text": "\x85\u2028\u2029"} for chunk in chunks]
            events = [f"data: {json.dumps(value, ensure_ascii=False)}\n\n" for value in values]
            self._send(200, "".join([*events, "data: [DONE]\n\n"]).encode(), "text/event-stream")

        def _refuse(self, message: str) -> None:
            self._reply(400, {"error": {"message": message, "type": "BadRequestError", "param": None, "code": 400}})

        def _reply(self, status: int, value: JSON) -> None:
            self._send(status, json.dumps(value).encode())

        def _send(self, status: int, content: bytes, kind: str = "application/json") -> None:
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Do not write to stderr."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        stub = Stub(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield stub
        finally:
            server.shutdown()
            thread.join()


def _choice(sample: TrainingSample, start: int, end: int) -> JSON:
    """Return some tokens of a sample; the finish reason is in the last of them."""
    entries = []
    for position in range(start, end):
        token, logprob = sample.completion_tokens[position], sample.logprobs[position]
        known = {one.token: one.logprob for one in (sample.top_logprobs or ((),) * end)[position]}
        listed = list({token: logprob, **known}.items())[: max(len(known), 1)]
        tops = [{"token": f"token_id:{one}", "logprob": value, "bytes": None} for one, value in listed]
        entries.append({"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": tops})
    is_last = end == len(sample.completion_tokens)
    return {
        "index": sample.sample_index,
        "logprobs": {"content": entries},
        "finish_reason": sample.finish_reason if is_last else None,
        "token_ids": list(sample.completion_tokens[start:end]),
    }


def _chunks(sample: TrainingSample) -> Iterator[JSON]:
    yield from (_choice(sample, index, index + 1) for index in range(len(sample.completion_tokens)))


def _prompt_logprobs(sample: TrainingSample) -> list[JSON | None] | None:
    if sample.prompt_logprobs is None:
        return None
    found = zip(sample.prompt_tokens[1:], sample.prompt_logprobs, strict=True)
    return [None, *({str(token): {"logprob": value, "rank": 1, "decoded_token": ""}} for token, value in found)]
