"""Run the generated tests of OpenAI's Python client against `nano-inference serve`, and count what passes.

    pip download --no-deps --no-build-isolation --no-binary openai openai==3.57.0    # needs hatchling
    tar xf openai-3.57.0.tar.gz
    python benchmarks/foreign_suites/run_openai.py openai-3.57.0 [--only test_responses.py]

Each test calls a method with few or with all parameters, and compares the types of the reply with the client's. They
expect recorded replies and send any value, so this server has the default model under any name, answers end after 16
tokens, and `openai_replies.py` puts ids of stored replies, and inputs, into the copied tests of responses. The
interpreter needs this package, `openai[aiohttp]` of the same version, `pytest-asyncio`, `pytest-timeout` and `rich`. On
two cores about two minutes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from openai_replies import fill_in

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from harness import serving  # noqa: E402

FILES = (
    *("chat/test_completions.py", "test_completions.py", "test_embeddings.py", "test_models.py"),
    *("test_responses.py", "responses/test_input_items.py", "responses/test_input_tokens.py"),
)
"""Below tests/api_resources."""
WITHOUT_ROUTE = "(completions and (retrieve or update or list or delete)) or (models and delete) or cancel"
"""Methods that no route of the server answers: of stored chats, deleted models, responses in the background."""
CHOSEN = f"not (path_params or {WITHOUT_ROUTE})"
"""Nor is a parameter that the client refuses itself a test of the server."""
OPTIONS = ("--any-model", "--n-predict", "16", "--max-model-len", "1024", "--insecure")
CONFIG = "[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = session\n"


def main() -> int:
    """Run the files; return 0 if pytest could run them, whatever passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", type=Path, help="the unpacked sources")
    parser.add_argument("--only", default="", help="part of a file's name")
    given = parser.parse_args()
    options = ["-q", "--tb=no", "-p", "no:cacheprovider", "-p", "counting", "--timeout", "240", "-k", CHOSEN]
    with tempfile.TemporaryDirectory() as folder, serving("default", OPTIONS) as (port, _):
        shutil.copytree(given.suite / "tests", Path(folder) / "tests")
        (Path(folder) / "pytest.ini").write_text(CONFIG, encoding="utf-8")
        paths = [f"tests/api_resources/{name}" for name in FILES if given.only in name]
        for path in paths:
            if "responses" in path:
                fill_in(Path(folder) / path)
        command = [sys.executable, "-m", "pytest", *options, *paths]
        environment = {"PYTHONPATH": str(HERE), "TEST_API_BASE_URL": f"http://127.0.0.1:{port}/v1"}
        done = subprocess.run(command, cwd=folder, env=os.environ | environment, check=False)
    return 0 if done.returncode in (0, 1) else 2


if __name__ == "__main__":
    sys.exit(main())
