"""Play a new user on a fresh clone, with empty home and caches: seconds and bytes downloaded for each step.

`laptop` runs `make demo` and asks one question in a chat; `script` installs into an environment of its own and runs the
Python of README.md; `page` starts a server and loads its chat page, as a browser does.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTHON = str(Path(sys.base_prefix) / "bin" / "python3")
"""The Python that `.venv` is made with, not that of an environment this script runs in."""
KEPT = ("PATH", "LANG", "TERM", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE")
"""Variables that a new user has. Those of proxies and of pip's sources are kept as well: the network demands them."""
KEPT_BEGINNINGS = ("PIP_", "HTTP_", "HTTPS_", "NO_PROXY", "http_", "https_", "no_proxy")
QUESTION = "What is the capital of France?"
MAX_STEP_S = 3600.0
STARTING_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of a user, done."""

    user: str
    name: str
    seconds: float
    num_bytes: int | None
    """Downloaded; None where the system does not count it."""
    result: str


@dataclass(slots=True)
class User:
    """A user with a home of their own, who does one step after another."""

    name: str
    home: Path
    steps: list[Step] = field(default_factory=list)

    @property
    def clone(self) -> Path:
        """Where the repository is cloned to."""
        return self.home / "nano-inference"

    def environment(self) -> dict[str, str]:
        """Return the variables of the user's commands."""
        kept = {name: text for name, text in os.environ.items() if name in KEPT or name.startswith(KEPT_BEGINNINGS)}
        kept.pop("PIP_CACHE_DIR", None)
        return kept | {"HOME": str(self.home), "PWD": str(self.clone)}

    def do(self, name: str, work: Callable[[], str]) -> None:
        """Time a step and keep what it was."""
        print(f"{self.name}: {name}", file=sys.stderr, flush=True)
        before, start = received_bytes(), time.perf_counter()
        result = work()
        seconds, after = time.perf_counter() - start, received_bytes()
        num_bytes = None if before is None or after is None else after - before
        self.steps.append(Step(user=self.name, name=name, seconds=seconds, num_bytes=num_bytes, result=result))

    def run(self, *words: str, typed: str = "", where: Path | None = None) -> str:
        """Run a command; return its stdout. Raises `RuntimeError` with the end of its output when it fails."""
        done = subprocess.run(
            words,
            cwd=where or self.clone,
            env=self.environment(),
            input=typed,
            capture_output=True,
            text=True,
            timeout=MAX_STEP_S,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)}: exit code {done.returncode}\n{(done.stdout + done.stderr)[-2000:]}")
        return done.stdout

    def get_clone(self) -> str:
        """Clone this repository's current commit."""
        self.run("git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(self.clone), where=self.home)
        return self.run("git", "rev-parse", "--short", "HEAD").strip()


def received_bytes() -> int | None:
    """Return the bytes that this machine's network interfaces have received, loopback left out; Linux only."""
    try:
        lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    except OSError:
        return None
    rows = (line.partition(":") for line in lines)
    counts = [int(numbers.split()[0]) for name, _, numbers in rows if name.strip() != "lo"]
    return sum(counts) if counts else None


def laptop(user: User) -> None:
    """`make demo`, then a chat through a pipe."""
    user.do("git clone", user.get_clone)
    user.do("make demo", lambda: summary(user.run("make", "demo", f"PYTHON={PYTHON}")))
    user.do("nano-inference chat", lambda: ask(user, ".venv"))
    user.do("nano-inference chat, again", lambda: ask(user, ".venv"))


def script(user: User) -> None:
    """pip into an environment of one's own, then the documentation's Python."""
    user.do("git clone", user.get_clone)
    venv = user.home / "venv"
    user.do("install_torch.py", lambda: installed(user.run(PYTHON, "scripts/install_torch.py", str(venv))))
    user.do("pip install '.[grammar]'", lambda: installed(user.run(f"{venv}/bin/pip", "install", ".[grammar]")))
    code = user.home / "first.py"
    code.write_text(first_rollout((user.clone / "README.md").read_text(encoding="utf-8")))
    user.do("the first rollout", lambda: last_line(user.run(f"{venv}/bin/python", str(code), where=user.home)))


def page(user: User) -> None:
    """A server until it is ready, and what the chat page loads; then one streamed answer."""
    user.do("git clone", user.get_clone)
    user.do("make .venv/ready", lambda: installed(user.run("make", ".venv/ready", f"PYTHON={PYTHON}")))
    with server(user) as url:
        user.do("nano-inference serve, until /ready", lambda: wait_until_ready(url))
        user.do("GET / and /info", lambda: load_page(url))
        user.do("one streamed chat", lambda: stream_chat(url))


USERS: dict[str, Callable[[User], None]] = {"laptop": laptop, "script": script, "page": page}


def ask(user: User, venv: str) -> str:
    """Ask one question through a pipe."""
    command = (f"{venv}/bin/nano-inference", "chat", "--temperature", "0", "--quiet")
    return last_line(user.run(*command, typed=QUESTION + "\n"))


def first_rollout(text: str) -> str:
    """Return the Python block below "Sample a rollout"."""
    found = re.search(r"^## Sample a rollout\n.*?^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert found is not None, "README.md has no Python below 'Sample a rollout'"
    return found[1]


@contextmanager
def server(user: User) -> Iterator[str]:
    """Start a server on a free port; it ends with the block. Yields its URL."""
    command = [str(user.clone / ".venv" / "bin" / "nano-inference"), "serve", "--port", "0"]
    log = user.home / "serve.log"
    with log.open("w") as out:
        process = subprocess.Popen(command, cwd=user.clone, env=user.environment(), stderr=out, stdout=out)
    try:
        yield listening_url(process, log)
    finally:
        process.terminate()
        process.wait(60)


def listening_url(process: subprocess.Popen[bytes], log: Path) -> str:
    """Wait until the server says where it listens; return that."""
    for _ in range(int(STARTING_S * 20)):
        found = re.search(r"listening on (http://\S+),", log.read_text())
        if found is not None:
            return found[1]
        if process.poll() is not None:
            break
        time.sleep(0.05)
    raise RuntimeError(f"nano-inference serve does not listen:\n{log.read_text()[-2000:]}")


def wait_until_ready(url: str) -> str:
    """Wait until a model is loaded, fetched where it is not there."""
    deadline = time.perf_counter() + MAX_STEP_S
    while time.perf_counter() < deadline:
        try:
            return f"/ready says {fetch(f'{url}/ready')[0]}"
        except urllib.error.HTTPError as error:
            error.close()
            time.sleep(0.1)
    raise RuntimeError("/ready does not become 200")


def load_page(url: str) -> str:
    """Fetch what the chat page needs."""
    _, html = fetch(f"{url}/")
    _, info = fetch(f"{url}/info")
    assert b"<html" in html[:2000].lower()
    return f"page of {len(html)} bytes, model {json.loads(info).get('model')}"


def stream_chat(url: str) -> str:
    """Stream one answer; return it with the time of its first words."""
    body = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 32, "stream": True}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    start, first, text = time.perf_counter(), 0.0, ""
    with urllib.request.urlopen(request, timeout=STARTING_S) as reply:
        for line in reply:
            if line.startswith(b"data: {"):
                choices = json.loads(line[6:])["choices"]
                text += "".join(choice["delta"].get("content") or "" for choice in choices)
                first = first or (time.perf_counter() - start if text else 0.0)
    return f"{text.strip()!r}, first words after {first:.2f} s"


def fetch(url: str) -> tuple[int, bytes]:
    """GET a URL of the server, without a proxy."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=60) as reply:
        return reply.status, reply.read()


def last_line(text: str) -> str:
    """Return the last line that says something."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def installed(text: str) -> str:
    """Return how many packages pip says that it installed."""
    lines = [line for line in text.splitlines() if line.startswith("Successfully installed ")]
    return f"{sum(len(line.split()) - 2 for line in lines)} packages installed"


def summary(text: str) -> str:
    """Return the demo's line with its answer's speed."""
    return next((line for line in text.splitlines() if "tokens/s" in line), last_line(text))


def table(steps: Sequence[Step]) -> str:
    """Return the steps as a table, with a sum for each user."""
    lines = ["| user | step | seconds | MB downloaded | result |", "|---|---|---|---|---|"]
    for user in dict.fromkeys(step.user for step in steps):
        own = [step for step in steps if step.user == user]
        lines += [row(step) for step in own]
        counted = [step.num_bytes for step in own if step.num_bytes is not None]
        total = sum(counted) if len(counted) == len(own) else None
        seconds = sum(step.seconds for step in own)
        lines.append(row(Step(user=user, name="all", seconds=seconds, num_bytes=total, result="")))
    return "\n".join(lines)


def row(step: Step) -> str:
    """Return one line of the table."""
    megabytes = "not counted" if step.num_bytes is None else f"{step.num_bytes / 1e6:.1f}"
    result = step.result.replace("|", "/")[:90]
    return f"| {step.user} | {step.name} | {step.seconds:.1f} | {megabytes} | {result} |"


def main() -> None:
    """Play the chosen users and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(USERS), help="users to play, by comma (default: %(default)s)")
    options = parser.parse_args()
    names = options.only.split(",")
    unknown = set(names) - set(USERS)
    if unknown:
        parser.error(f"--only: {', '.join(sorted(unknown))} is not a user; known: {', '.join(USERS)}")
    steps: list[Step] = []
    for name in names:
        with tempfile.TemporaryDirectory(prefix="first-minutes-") as home:
            user = User(name, Path(home))
            USERS[name](user)
            steps += user.steps
    print(table(steps))
    print("MB downloaded: what the network interfaces but loopback received (/proc/net/dev), other programs' included")


if __name__ == "__main__":
    main()
