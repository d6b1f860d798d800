"""POST /update_weights_from_body: a safetensors file in the body, installed whole or not at all."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save

from nano_inference import weights_checksum
from tests.server.tiny import Running
from tests.server.trainer import PROMPT, SHORT, Stream, fresh_tokens, make_weights, ok, refused, serving

pytestmark = pytest.mark.slow

PATH = "/update_weights_from_body"
BYTES = {"content-type": "application/octet-stream"}


@pytest.fixture(scope="module")
def new(tiny_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_weights(tiny_directory, tmp_path_factory.mktemp("body") / "new", seed=21)


@pytest.fixture(scope="module")
def body(new: Path) -> bytes:
    return (new / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def server(tiny_directory: Path) -> Iterator[Running]:
    with serving(tiny_directory, weight_timeout=60, admin_key=("an-admin-key",)) as one:
        one.client.headers["authorization"] = "Bearer an-admin-key"
        yield one


def send(server: Running, content: Any, query: str = "", **headers: str) -> Any:
    return server.client.post(PATH + query, content=content, headers={**BYTES, **headers})


def checksum(server: Running) -> str:
    return str(ok(server.post("/weight_checker", {"action": "checksum"}))["checksum"])


def test_weights_are_installed_with_their_label(server: Running, body: bytes, new: Path, tiny_directory: Path) -> None:
    reply = ok(send(server, body, "?weight_version=step-3"))
    assert (reply["message"], reply["weight_version"]) == ("Weights updated", "step-3")
    assert Stream(server, params=SHORT).result().completion_tokens == fresh_tokens(tiny_directory, new, PROMPT, SHORT)
    digest, version = checksum(server), reply["version"]
    pieces = (body[start : start + 1000] for start in range(0, len(body), 1000))  # chunked, in small parts
    assert ok(send(server, pieces, f"?checksum={digest}"))["version"] == version + 1
    refused(send(server, body, "?checksum=0000"), 400, "checksum")
    assert checksum(server) == digest


def test_ignored_tensors_are_read_and_dropped(server: Running, new: Path) -> None:
    named = load_file(new / "model.safetensors")
    ignored = {"a.rotary_emb.inv_freq": torch.zeros(3 << 18), "z.rotary_emb.inv_freq": torch.zeros(0)}
    ok(send(server, save({**ignored, **named})))
    assert checksum(server) == weights_checksum(named)


def test_a_part_of_the_weights_needs_partial(server: Running, new: Path) -> None:
    part = save({"model.norm.weight": load_file(new / "model.safetensors")["model.norm.weight"] * 2})
    before = checksum(server)
    refused(send(server, part), 400, "lacks 20 tensors")
    assert checksum(server) == before
    ok(send(server, part, "?partial=true"))
    assert checksum(server) != before


def test_running_requests_may_be_aborted(server: Running, body: bytes) -> None:
    for query, reason in (("?abort_all_requests=true", "abort"), ("", "length")):
        stream = Stream(server).started()
        ok(send(server, body, query))
        assert stream.result().finish_reason == reason


def header(entries: dict[str, Any]) -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text


def entry(shape: list[int], start: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


NORM = "model.norm.weight"
DAMAGED: list[tuple[bytes, str]] = [
    (b"", "body ended 8 bytes before"),
    (struct.pack("<Q", 1 << 60), "header of 1152921504606846976 bytes"),
    (struct.pack("<Q", 20) + b"{}", "body ended 18 bytes before"),
    (struct.pack("<Q", 4) + b"[[[[", "header"),
    (header({"other": entry([1], 0, 4)}) + bytes(4), "other: the model has no such tensor"),
    (
        header({NORM: entry([1 << 40], 0, 1 << 42)}),
        "model.norm.weight: has the shape (1099511627776,), the model (32,)",
    ),
    (header({NORM: entry([16], 0, 64, "I8")}) + bytes(64), "dtype 'I8'"),
    (header({NORM: entry([16], 8, 72)}) + bytes(72), "does not follow"),
]


@pytest.mark.parametrize(("content", "part"), DAMAGED)
def test_a_damaged_body_leaves_the_old_weights(server: Running, content: bytes, part: str) -> None:
    before = checksum(server)
    refused(send(server, content), 400, part)
    assert checksum(server) == before


@pytest.mark.parametrize("change", ["cut", "longer", "nan"])
def test_a_body_that_is_wrong_at_its_end_leaves_the_old_weights(server: Running, body: bytes, change: str) -> None:
    before = checksum(server)
    nan = torch.tensor([torch.nan]).numpy().tobytes()
    content = {"cut": body[:-1], "longer": body + b"\0", "nan": body[:-4] + nan}[change]
    parts = {"cut": "body ended 1 bytes before", "longer": "bytes follow the last tensor", "nan": "NaN or infinity"}
    refused(send(server, content), 400, parts[change])
    assert checksum(server) == before


def test_invalid_headers_are_refused_before_the_body_is_read(server: Running, body: bytes) -> None:
    refused(send(server, body, **{"content-type": "application/json"}), 415, "application/octet-stream")
    refused(send(server, body, **{"content-encoding": "gzip"}), 415, "Content-Encoding")
    refused(send(server, body, **{"authorization": "Bearer another-key"}), 403, "admin key")
    refused(send(server, body, **{"origin": "https://example.org"}), 403, "web pages")
    refused(send(server, body, "?weight_versions=1"), 400, "weight_versions: there is no such field")


def comes_to_be(server: Running, state: str) -> None:
    deadline = time.monotonic() + 60
    while ok(server.client.get("/weight_info"))["update"] != state:
        assert time.monotonic() < deadline, f"no update is {state}"


def test_a_client_that_disconnects_leaves_the_old_weights(server: Running, body: bytes) -> None:
    before = checksum(server)
    with socket.create_connection((server.client.base_url.host, server.client.base_url.port), timeout=30) as wire:
        lines = [f"POST {PATH} HTTP/1.1", "host: localhost", "authorization: Bearer an-admin-key"]
        lines += ["content-type: application/octet-stream", f"content-length: {len(body)}", "", ""]
        wire.sendall("\r\n".join(lines).encode() + body[: len(body) // 2])
        comes_to_be(server, "staging")
    comes_to_be(server, "idle")
    assert checksum(server) == before
    ok(send(server, body))


def test_a_body_that_stalls_is_given_up(tiny_directory: Path, body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    hours = [0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + hours[0] * 3600)
    monkeypatch.setattr("nano_inference.weights.sync.time", clock)
    with serving(tiny_directory, weight_timeout=60) as impatient:
        address = (impatient.client.base_url.host, impatient.client.base_url.port)
        with socket.create_connection(address, timeout=30) as wire:
            lines = [f"POST {PATH} HTTP/1.1", "host: localhost", "content-type: application/octet-stream"]
            wire.sendall("\r\n".join([*lines, f"content-length: {len(body)}", "", ""]).encode() + body[:-9])
            comes_to_be(impatient, "staging")
            hours[0] = 1
            impatient.on_engine(lambda: None)  # an idle engine takes a turn only after a command
            assert b" 400 " in wire.recv(4096)
        ok(impatient.client.post(PATH, content=body, headers=BYTES))
