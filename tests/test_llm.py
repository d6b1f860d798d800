"""`LLM`, `engine.chat` and texts of samples, against Transformers' tokenizer and template on the default model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from nano_inference import LLM, BadRequest, InferenceEngine, LoRARequest, SamplingParams
from tests.sim.fakes import fake_engine

GREEDY = SamplingParams(temperature=0, max_tokens=8)
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def llm(default_model_path: Path) -> Any:
    made = LLM(default_model_path, max_model_len=256, max_num_seqs=8)
    yield made
    made.llm_engine.shutdown()


@pytest.mark.model
def test_texts_and_ids_give_the_engines_samples(llm: LLM) -> None:
    engine = llm.llm_engine
    prompts = ["The capital of France is", "One, two, three,"]
    ids = [engine.tokenizer.encode(text) for text in prompts]
    expected = engine.generate(ids, GREEDY, with_text=True)
    found = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [(one.prompt, list(one.prompt_token_ids)) for one in found] == list(zip(prompts, ids, strict=True))
    assert [one.outputs[0].token_ids for one in found] == [one.completion_tokens for one in expected]
    assert [one.outputs[0].text for one in found] == [one.text for one in expected]
    assert "Paris" in found[0].outputs[0].text and found[0].outputs[0].finish_reason == "length"
    for given in (ids, [{"prompt_token_ids": one} for one in ids], [{"prompt": text} for text in prompts]):
        assert [one.outputs for one in llm.generate(given, GREEDY, use_tqdm=False)] == [one.outputs for one in found]
    assert llm.generate(prompts[0], GREEDY, use_tqdm=False)[0].outputs == found[0].outputs


@pytest.mark.model
def test_several_samples_own_parameters_and_logprobs(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=3, seed=1, logprobs=2), SamplingParams(max_tokens=4, seed=2, stop="e")]
    first, second = llm.generate(["Once", "Twice"], params, use_tqdm=False, n=3)
    assert [one.index for one in first.outputs] == [0, 1, 2] == [one.index for one in second.outputs]
    for one in first.outputs:
        assert one.logprobs is not None
        for token, tops in zip(one.token_ids, one.logprobs, strict=True):
            ranks = sorted(top.rank for top in tops.values() if top.rank is not None)
            assert token in tops and ranks == [1, 2]
        total = sum(tops[token].logprob for token, tops in zip(one.token_ids, one.logprobs, strict=True))
        assert math.isclose(total, one.cumulative_logprob, abs_tol=1e-6)
    for one in second.outputs:
        assert one.logprobs is None and "e" not in one.text
        assert (one.stop_reason == "e") == (one.finish_reason == "stop")


@pytest.mark.model
def test_chat_renders_as_transformers_and_ends_the_text_before_the_end_token(
    llm: LLM, default_model_path: Path
) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(default_model_path.parent, gguf_file=default_model_path.name)
    (found,) = llm.chat(QUESTION, SamplingParams(temperature=0, max_tokens=40), use_tqdm=False)
    text = theirs.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True)
    assert theirs.decode(found.prompt_token_ids) == text
    assert found.outputs[0].text == theirs.decode(found.outputs[0].token_ids, skip_special_tokens=True)
    assert "Paris" in found.outputs[0].text and found.outputs[0].finish_reason == "stop"
    sample = llm.llm_engine.chat(QUESTION, SamplingParams(temperature=0, max_tokens=40))
    assert sample.text == found.outputs[0].text and sample.completion_tokens == found.outputs[0].token_ids
    both = llm.chat([QUESTION, QUESTION], SamplingParams(temperature=0, max_tokens=40), use_tqdm=False)
    assert [one.outputs[0].text for one in both] == [sample.text] * 2


@pytest.mark.model
def test_chat_takes_the_models_defaults(llm: LLM) -> None:
    engine = InferenceEngine("default", parts=llm.llm_engine.parts)
    sample = engine.chat(QUESTION)
    assert sample.text and "Paris" in sample.text


@pytest.mark.model
def test_wrong_prompts_are_named(llm: LLM) -> None:
    for wrong, name in (([3.5], "prompts"), ([{"text": "x"}], "prompts"), ([[]], "prompt")):
        with pytest.raises(BadRequest, match=name):
            llm.generate(wrong, GREEDY, use_tqdm=False)  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match="messages"):
        llm.chat([{"content": "x"}], GREEDY, use_tqdm=False)


def test_an_engine_without_a_tokenizer_names_it() -> None:
    engine = fake_engine()
    with pytest.raises(BadRequest, match="tokenizer"):
        engine.generate([[5]], GREEDY, with_text=True)
    with pytest.raises(BadRequest, match="chat template"):
        engine.chat(QUESTION)


@pytest.mark.model
def test_lora_request_loads_an_adapter_once(llm: LLM, tmp_path: Path) -> None:
    shapes = llm.llm_engine.weight_shapes()
    name = next(name for name in shapes if name.endswith("layers.0.mlp.down_proj.weight"))
    num_out, num_in = shapes[name]
    begin = f"base_model.model.{name.removesuffix('.weight')}"
    tensors = {f"{begin}.lora_A.weight": torch.ones(1, num_in), f"{begin}.lora_B.weight": torch.ones(num_out, 1)}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 1, "lora_alpha": 1}')
    request = LoRARequest("policy", 1, str(tmp_path))
    plain, *adapted = [
        llm.generate("One, two, three,", GREEDY, use_tqdm=False, lora_request=one)[0].outputs[0].token_ids
        for one in (None, request, request)
    ]
    assert plain != adapted[0] == adapted[1]
    assert [(one.name, one.version) for one in llm.llm_engine.adapters()] == [("policy", 1)]
    with pytest.raises(BadRequest, match="adapter"):
        llm.chat(QUESTION, GREEDY, use_tqdm=False, lora_request=LoRARequest("other", 2, str(tmp_path / "none")))
