"""Run vLLM's tests of its servers against `nano-inference serve`, and count what passes.

    VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=0.33.0 SETUPTOOLS_SCM_PRETEND_VERSION=0.33.0 \\
        pip download --no-deps --no-build-isolation --no-binary vllm vllm==0.33.0    # needs torch, setuptools-scm
    tar xf vllm-0.33.0.tar.gz
    python benchmarks/foreign_suites/run_vllm.py vllm-0.33.0 [--only test_chat.py]

The tests are copied to a temporary folder with stand-ins for `tests/utils.py`, which starts their server, and for the
modules of vLLM that they import (`vllm_plugin.py`). The interpreter needs this package, `openai`, `anthropic`,
`transformers`, `pytest-asyncio`, `pytest-timeout`, `regex`, `jsonschema`, `prometheus_client`, `requests` and `httpx`.

Three runs: most files with the default model, answers cut off at a context of 1,536 tokens; two that need 8,192; and
three, about reasoning and functions, with a model whose weights are set so that it reasons and calls functions, as the
default model cannot (`agent_model.py`); its tokens are bytes, so its contexts are four times as long. The
cache has blocks of 16 tokens, as vLLM's. On two cores about half an hour.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from agent_model import write_agent

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FILES = (
    *("openai/chat_completion/test_chat.py", "openai/chat_completion/test_chat_completion.py"),
    *("openai/chat_completion/test_chat_echo.py", "openai/chat_completion/test_chat_logit_bias_validation.py"),
    "openai/chat_completion/test_enable_force_include_usage.py",
    *("openai/chat_completion/test_logprob_token_ids.py", "openai/chat_completion/test_root_path.py"),
    *("openai/completion/test_completion.py", "openai/completion/test_prompt_validation.py"),
    *("openai/completion/test_token_in_token_out.py", "openai/models/test_models.py"),
    *("openai/test_return_token_ids.py", "openai/test_return_tokens_as_ids.py"),
    *("serve/instrumentator/test_basic.py", "serve/instrumentator/test_metrics.py"),
    *("serve/instrumentator/test_orca_metrics.py", "serve/instrumentator/test_uds.py"),
)
"""Below tests/entrypoints, with the default model."""
LONG = ("serve/tokenize/test_tokenization.py", "openai/test_chunked_prompt.py")
AGENT = (
    "openai/chat_completion/test_include_reasoning.py",
    "openai/chat_completion/test_completion_with_function_calling.py",
    "anthropic/test_messages.py",
)
MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"
"""File of the default model in the cache."""


def main() -> int:
    """Run the files; return 0 if pytest could run them, whatever passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", type=Path, help="the unpacked sources")
    parser.add_argument("--only", default="", help="part of a file's name")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "nano-inference")
    given = parser.parse_args()
    codes = []
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        for part in ("entrypoints", "models"):
            shutil.copytree(given.suite / "tests" / part, home / "tests" / part)
        shutil.copytree(given.suite / "examples", home / "examples")
        (home / "tests" / "__init__.py").touch()
        shutil.copy(HERE / "vllm_utils.py", home / "tests" / "utils.py")  # the stand-in
        (home / "tests" / "conftest.py").write_text("class LocalAssetServer: ...\n", encoding="utf-8")
        settings = "asyncio_mode = auto\nasyncio_default_fixture_loop_scope = function"
        (home / "pytest.ini").write_text(f"[pytest]\n{settings}\n", encoding="utf-8")
        default = {"NANO_MODEL": "default", "NANO_TOKENIZER": str(given.cache), "NANO_TOKENIZER_FILE": MODEL}
        agent = write_agent(home / "agent", "get_current_weather")
        acting = {"NANO_MODEL": str(agent), "NANO_TOKENIZER": str(agent), "NANO_SCALE": "4"}
        for files, model, context in ((AGENT, acting, 8192), (LONG, default, 8192), (FILES, default, 1536)):
            chosen = [name for name in files if given.only in name]
            if chosen:
                codes.append(run(home, chosen, {**model, "NANO_CONTEXT": str(context)}))
    return 0 if codes and set(codes) <= {0, 1} else 2


def run(home: Path, files: Sequence[str], model: dict[str, str]) -> int:
    """Run some files; return pytest's exit code."""
    sources = os.pathsep.join([str(HERE), str(ROOT / "src"), str(ROOT)])
    environment = os.environ | {"NANO_SCALE": "1"} | model | {"PYTHONPATH": sources, "HF_HUB_OFFLINE": "1"}
    options = ["-q", "--tb=no", "-p", "no:cacheprovider", "-p", "vllm_plugin", "-p", "counting", "--timeout", "240"]
    paths = [f"tests/entrypoints/{name}" for name in files]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, *paths], cwd=home, env=environment, check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
