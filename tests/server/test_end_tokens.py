"""Which tokens end an answer: one set for Python and every route, from the configuration and the tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from nano_inference import EngineConfig, InferenceEngine, SamplingParams
from tests.server.tiny import running

pytestmark = pytest.mark.slow

CONFIGS, TOKENIZERS, BOTH, OTHER = 65, 257, 66, 67
"""End tokens: of config.json, `eos_token` of the tokenizer, of generation_config.json; and none."""
CASES: dict[str, tuple[Any, Any, set[int]]] = {
    "the tokenizer's beside both files'": (CONFIGS, BOTH, {CONFIGS, BOTH, TOKENIZERS}),
    "null in config.json": (None, None, {TOKENIZERS}),
    "another in config.json": (CONFIGS, None, {CONFIGS, TOKENIZERS}),
}


def written(source: Path, directory: Path, config_eos: Any, generation_eos: Any) -> Path:
    shutil.copytree(source, directory)
    config = json.loads((directory / "config.json").read_text()) | {"eos_token_id": config_eos}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").unlink()
    if generation_eos is not None:
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": generation_eos}))
    return directory


@pytest.mark.parametrize("case", CASES)
def test_end_tokens_of_python_and_all_routes(case: str, tiny_directory: Path, tmp_path: Path) -> None:
    config_eos, generation_eos, wanted = CASES[case]
    directory = written(tiny_directory, tmp_path / "model", config_eos, generation_eos)
    config = EngineConfig(model_path=str(directory), kv_cache_bytes=8 << 20, device="cpu", num_threads=1)
    with InferenceEngine(config) as engine:
        samples = {
            token: engine.generate([[1, 2]], SamplingParams(max_tokens=3, allowed_token_ids=[token]))[0]
            for token in (CONFIGS, BOTH, TOKENIZERS, OTHER)
        }
        ignoring = SamplingParams(max_tokens=3, allowed_token_ids=[TOKENIZERS], ignore_eos=True)
        assert engine.generate([[1, 2]], ignoring)[0].finish_reason == "length"
    assert {token for token, one in samples.items() if one.finish_reason == "stop"} == wanted
    with running(directory) as server:
        info = server.client.get("/tokenizer_info").json()
        assert set(info["eos_token_ids"]) == wanted and info["eos_token_ids"][0] == TOKENIZERS
        for token in (CONFIGS, BOTH, TOKENIZERS, OTHER):
            reason = "stop" if token in wanted else "length"
            body: dict[str, Any] = {"max_tokens": 3, "allowed_token_ids": [token]}
            chat = server.post("/v1/chat/completions", body | {"messages": [{"role": "user", "content": "a"}]})
            plain = server.post("/v1/completions", body | {"prompt": "a"})
            assert [one.json()["choices"][0]["finish_reason"] for one in (chat, plain)] == [reason, reason]
            biased = {"max_new_tokens": 3, "temperature": 0, "logit_bias": {str(token): 100}}
            sglang = server.post("/generate", {"text": "a", "sampling_params": biased}).json()
            assert sglang["meta_info"]["finish_reason"]["type"] == reason
            llamacpp = server.post("/completion", {"prompt": "a", "n_predict": 3, "logit_bias": [[token, 100]]}).json()
            assert llamacpp["stop_type"] == ("eos" if reason == "stop" else "limit")
