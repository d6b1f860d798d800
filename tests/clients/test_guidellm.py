"""guidellm measures the default model under a short load.

guidellm needs a tokenizer directory to build prompts of a given length; the default model is a GGUF file, from which
Transformers writes that directory without access to a hub.
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.process import NEEDED, Served, program, serving, succeed
from tests.clients.recipes import printed_command

if importlib.util.find_spec("guidellm") is None:  # importing it would replace the event loop policy of this process
    pytest.skip(f"guidellm: {NEEDED}", allow_module_level=True)
transformers = pytest.importorskip("transformers", reason="writes the tokenizer")
pytestmark = pytest.mark.model

NUM_REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 20, 32, 8


@pytest.fixture(scope="module")
def tokenizer_directory(default_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default model's tokenizer as Transformers saves it."""
    directory = tmp_path_factory.mktemp("default_tokenizer")
    place, name = default_model_path.parent, default_model_path.name
    transformers.AutoTokenizer.from_pretrained(place, gguf_file=name, local_files_only=True).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def default_server(default_model_path: Path) -> Iterator[Served]:
    with serving(default_model_path, "--device", "cpu", "--kv-cache-bytes", str(256 << 20)) as served:
        yield served


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
def test_load_has_no_errors_and_finite_metrics(
    default_server: Served, tokenizer_directory: Path, tmp_path: Path, route: str
) -> None:
    report = tmp_path / "report.json"
    printed = printed_command("guidellm", default_server.url, "default")
    changes = {
        "count=40": f"count={NUM_REQUESTS}",
        "prompt_tokens=64": f"prompt_tokens={PROMPT_TOKENS}",
        "output_tokens=32": f"output_tokens={OUTPUT_TOKENS}",
        "A-TOKENIZER": str(tokenizer_directory),
        "request_format=/v1/completions": f"request_format={route}",
    }
    arguments = list(printed.arguments)
    for old, new in changes.items():
        assert sum(old in one for one in arguments) == 1
        arguments = [one.replace(old, new) for one in arguments]
    quiet = ("--disable-console", "--output", f"kind=json,path={report}")
    succeed([program("guidellm"), *arguments, *quiet], tmp_path)
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    metrics = benchmark["metrics"]
    assert metrics["request_totals"] == {
        "successful": NUM_REQUESTS,
        "errored": 0,
        "incomplete": 0,
        "total": NUM_REQUESTS,
    }
    for name in ("time_to_first_token_ms", "inter_token_latency_ms", "request_latency"):
        measured = metrics[name]["successful"]
        assert math.isfinite(measured["mean"]) and measured["mean"] > 0, name
        assert math.isfinite(measured["percentiles"]["p95"]), name
    assert num_output_tokens(benchmark) == [OUTPUT_TOKENS] * NUM_REQUESTS
    if route == "/v1/completions":
        assert metrics["prompt_token_count"]["successful"]["mean"] == pytest.approx(PROMPT_TOKENS, abs=2)


def num_output_tokens(benchmark: Any) -> list[int]:
    """Return the number of tokens of each answer: the server's usage, or guidellm's own count where there is none."""
    return [one["output_metrics"]["text_tokens"] for one in benchmark["requests"]["successful"]]
