"""Trainers of TRL generate with an engine in their own process: RLOO, GRPO with a tool, and PEFT's adapters."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from nano_inference import EngineConfig, InferenceEngine, weights_checksum
from nano_inference.rl.trl import ExactLogprobs, use_engine
from nano_inference.server.config import ServerConfig
from nano_inference.types import LogprobsMode
from tests.server.tiny import running

MISSING = [name for name in ("trl", "peft") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {' and '.join(MISSING)} (pip install '.[examples]')"),
    pytest.mark.filterwarnings("ignore"),  # TRL and its libraries warn about each other
]
"""Every process of a test run collects this file; TRL and PEFT are imported where they are used, which takes 2 s."""
QUESTION = [{"role": "user", "content": "2+3?"}]
CALL = [{"type": "function", "function": {"name": "plus", "arguments": {"a": 2, "b": 3}}}]
CONVERSATION = [
    *QUESTION,
    {"role": "assistant", "content": "", "tool_calls": CALL},
    {"role": "tool", "name": "plus", "content": "5"},
    {"role": "assistant", "content": "It is 5."},
]
SMALL: dict[str, Any] = {
    **{"use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no", "disable_tqdm": True},
    **{"logging_steps": 1, "max_steps": 2, "per_device_train_batch_size": 4, "num_generations": 2},
    **{"activation_checkpointing": False, "learning_rate": 1e-4},
}


def plus(a: int, b: int) -> int:
    """
    Adds two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


@pytest.fixture(scope="module")
def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A tokenizer of bytes with Qwen3's template, which TRL can parse."""
    from trl.chat_template_utils import qwen3_chat_template

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(name) for name in ("<|im_start|>", "<|im_end|>", "<|endoftext|>")])
    names = {"pad_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, chat_template=qwen3_chat_template, **names)


@pytest.fixture(scope="module")
def model_path(tokenizer: transformers.PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that knows one conversation by heart."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), **sizes, max_position_embeddings=2048, eos_token_id=tokenizer.eos_token_id
    )
    model = transformers.LlamaForCausalLM(config)
    ids = tokenizer.apply_chat_template(CONVERSATION, tools=[plus], return_dict=False, return_tensors="pt")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(120):
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 0.05
    directory = tmp_path_factory.mktemp("by_heart")
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def data(count: int = 8) -> Any:
    from datasets import Dataset

    return Dataset.from_list([{"prompt": QUESTION}] * count)


def open_engine(path: Path) -> InferenceEngine:
    return InferenceEngine(EngineConfig(model_path=str(path), device="cpu", kv_cache_bytes=16 << 20, seed=1))


def test_grpo_runs_a_tool(model_path: Path, tokenizer: transformers.PreTrainedTokenizerFast, tmp_path: Path) -> None:
    from trl import GRPOConfig, GRPOTrainer

    seen: list[Any] = []

    def reward(completions: list[Any], **_: Any) -> list[float]:
        seen.extend(completions)
        return [float("5" in str(one[-1]["content"])) for one in completions]

    config = GRPOConfig(str(tmp_path), **SMALL, max_completion_length=400, temperature=0.1)
    model = transformers.LlamaForCausalLM.from_pretrained(model_path)
    trainer = GRPOTrainer(model, reward, config, data(), None, tokenizer, tools=[plus])
    with open_engine(model_path) as engine:
        use_engine(trainer, engine)
        trainer.train()
        assert engine.get_weight_version() == 2
    assert [message["role"] for message in seen[0]] == ["assistant", "tool", "assistant"], seen[0]
    assert seen[0][1]["content"] == "5"
    for entry in trainer.state.log_history[:-1]:
        assert entry["sampling/sampling_logp_difference/max"] < 1e-3


def sums(completions: list[Any], **_: Any) -> list[float]:
    """Return rewards that differ within a group."""
    return [sum(map(ord, str(one[-1]["content"]))) / 1000 for one in completions]


def test_rloo_learns_with_an_engine(
    model_path: Path, tokenizer: transformers.PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    from trl import RLOOConfig, RLOOTrainer

    config = RLOOConfig(str(tmp_path), **SMALL, max_completion_length=24, temperature=1.0)
    model = transformers.LlamaForCausalLM.from_pretrained(model_path)
    trainer = RLOOTrainer(model, sums, config, data(), None, tokenizer)
    with open_engine(model_path) as engine:
        backend = use_engine(trainer, engine)
        trainer.train()
        assert engine.get_weight_version() == 2 and engine.weights_checksum() != checksum_of(model)
        backend.sync_weights()
        assert engine.weights_checksum() == checksum_of(model)


def test_an_adapter_that_the_engine_refuses_is_merged(
    model_path: Path,
    tokenizer: transformers.PreTrainedTokenizerFast,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer

    options = {**SMALL, "learning_rate": 1e-2, "max_steps": 3}
    config = GRPOConfig(str(tmp_path), **options, max_completion_length=24, temperature=1.0)
    model = transformers.LlamaForCausalLM.from_pretrained(model_path)
    adapters = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head"])
    trainer = GRPOTrainer(model, sums, config, data(), None, tokenizer, peft_config=adapters)
    with open_engine(model_path) as engine:
        before = engine.weights_checksum()
        backend = use_engine(trainer, engine)
        trainer.train()
        assert engine.weights_checksum() != before
        assert caplog.text.count("merged into the weights for each update: modules_to_save") == 1
        backend.sync_weights()
        merged = trainer.model.merge_and_unload()
        assert engine.weights_checksum() == checksum_of(merged)
    worst = [entry["sampling/sampling_logp_difference/max"] for entry in trainer.state.log_history[:-1]]
    assert len(worst) == 3 and max(worst) < 1e-3


def adapted(path: Path) -> Any:
    """Return the model with a LoRA that changes its answers."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    return get_peft_model(transformers.LlamaForCausalLM.from_pretrained(path), config)


def test_an_adapter_alone_is_sent_to_the_engine(
    model_path: Path, tokenizer: transformers.PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    from trl import GRPOConfig, GRPOTrainer

    options = {**SMALL, "learning_rate": 1e-2, "max_steps": 3}
    config = GRPOConfig(str(tmp_path), **options, max_completion_length=24, temperature=1.0)
    trainer = GRPOTrainer(adapted(model_path), sums, config, data(), None, tokenizer)
    with open_engine(model_path) as engine:
        backend = use_engine(trainer, engine)
        trainer.train()
        backend.sync_weights()
        assert engine.get_weight_version() == 1 and engine.weights_checksum() == checksum_of(trainer.model.unload())
        (adapter,) = engine.adapters()
        assert (adapter.name, adapter.version, backend.adapter) == ("trl-policy", 3, "trl-policy")
    worst = [entry["sampling/sampling_logp_difference/max"] for entry in trainer.state.log_history[:-1]]
    assert len(worst) == 3 and max(worst) < 1e-3


def test_async_grpos_client_publishes_adapters(model_path: Path, tmp_path: Path) -> None:
    """TRL's own functions of a weight update, as `AsyncGRPOTrainer._sync_weight_lora` calls them."""
    from accelerate import Accelerator
    from trl.experimental.async_grpo.async_grpo_trainer import save_lora_adapter, select_adapter_sync
    from trl.experimental.async_grpo.vllm_client import VLLMClient

    model = adapted(model_path)
    config = ServerConfig(port=0, log_requests=False, enable_rl=True, enable_lora=True, weights_dir=str(tmp_path))
    with running(model_path, config) as server:
        client = VLLMClient(server.url)
        client.wait_for_server_ready()
        staleness = 2
        assert select_adapter_sync(client.get_server_info(), model, SimpleNamespace(max_staleness=staleness))
        for version in range(1, 5):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter += 0.02 * torch.randn_like(parameter) * parameter.requires_grad
            name = f"trl-policy-v{version}"
            client.pause()
            save_lora_adapter(model, Accelerator(cpu=True), "default", str(tmp_path / ".vllm_lora" / name))
            client.load_lora_adapter(name, str(tmp_path / ".vllm_lora" / name))
            client.resume()
            client.unload_lora_adapter(f"trl-policy-v{version - (staleness + 1)}")
            body = {"model": name, "prompt": [72, 101, 108], "max_tokens": 8, "n": 1, "logprobs": 0}
            reply = server.post("/v1/completions", {**body, "return_token_ids": True, "seed": version}).json()
            (choice,) = reply["choices"]
            ids = torch.tensor([[*body["prompt"], *choice["token_ids"]]])
            found = model(ids).logits[0, 2:-1].double().log_softmax(-1).gather(-1, ids[0, 3:, None])[:, 0]
            assert choice["logprobs"]["token_logprobs"] == pytest.approx(found.tolist(), abs=CLOSE)
        names = [one["id"] for one in server.client.get("/v1/models").json()["data"]]
        assert names == ["tiny", "trl-policy-v2", "trl-policy-v3", "trl-policy-v4"]


def ratios_of(trainer: Any) -> tuple[float, float]:
    """Return the least and the largest importance ratio that TRL computed."""
    log = trainer.state.log_history[:-1]
    names = ("sampling/importance_sampling_ratio/min", "sampling/importance_sampling_ratio/max")
    return min(entry[names[0]] for entry in log), max(entry[names[1]] for entry in log)


CLOSE = 1e-4
"""Largest difference from Transformers' log-probabilities in float32, as in `tests.models`: it varies by processor."""
HOT: dict[str, Any] = {**SMALL, "max_steps": 1, "max_completion_length": 24, "temperature": 0.7}


@pytest.mark.parametrize(
    ("mode", "options"), [("raw", {}), ("tempered", {"top_p": 0.6}), ("processed", {"top_p": 0.6})]
)
def test_ratios_do_not_depend_on_the_engines_logprobs_mode(
    mode: LogprobsMode, options: dict[str, Any], model_path: Path, tokenizer: Any, tmp_path: Path
) -> None:
    """1 with a temperature; with top-p the probability of the kept tokens, as with vLLM."""
    from trl import GRPOConfig, GRPOTrainer

    config = GRPOConfig(str(tmp_path), **HOT, **options, vllm_importance_sampling_mode="token_truncate")
    model = transformers.LlamaForCausalLM.from_pretrained(model_path)
    trainer = GRPOTrainer(model, sums, config, data(), None, tokenizer)
    settings = EngineConfig(str(model_path), device="cpu", kv_cache_bytes=16 << 20, seed=1, logprobs_mode=mode)
    with InferenceEngine(settings) as engine:
        use_engine(trainer, engine)
        trainer.train()
    least, most = ratios_of(trainer)
    assert options.get("top_p", 1.0) - CLOSE <= least <= most <= 1 + CLOSE


EXACT: dict[str, Any] = {**SMALL, "max_completion_length": 16, "learning_rate": 1e-3, "num_iterations": 2}
METRIC = "sampling/sampling_logp_difference"


KINDS = ["GRPO", "RLOO", "GRPO with adapters", "GRPO with a tool", "GRPO, plain"]


@pytest.mark.parametrize("kind", KINDS)
def test_exact_values_have_ratios_of_exactly_1(kind: str, model_path: Path, tokenizer: Any, tmp_path: Path) -> None:
    import trl
    from peft import LoraConfig

    name = kind[:4]
    is_plain = kind.endswith("plain")
    options = {**EXACT, "max_steps": 20, "temperature": 0.8, "top_p": 1.0 if is_plain else 0.9, "beta": 0.04}
    roles: set[str] = set()

    def reward(completions: list[Any], **more: Any) -> list[float]:
        roles.update(message["role"] for one in completions for message in one)
        return sums(completions, **more)

    bases = (getattr(trl, f"{name}Trainer"),) if is_plain else (ExactLogprobs, getattr(trl, f"{name}Trainer"))
    more: dict[str, Any] = {}
    if "adapters" in kind:
        more["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
    if "tool" in kind:
        more["tools"] = [plus]
        options |= {"max_completion_length": 400, "temperature": 1.2, "top_p": 1.0, "learning_rate": 1e-5}
    config = getattr(trl, f"{name}Config")(str(tmp_path), **options)
    model = transformers.LlamaForCausalLM.from_pretrained(model_path)
    trainer = type("Trainer", bases, {})(model, reward, config, data(40), None, tokenizer, **more)
    with open_engine(model_path) as engine, engine.copy() as reference:
        use_engine(trainer, engine, None if is_plain else reference)
        trainer.train()
    assert ("tool" in roles) == ("tool" in kind)
    log = trainer.state.log_history[:-1]
    kls = [entry["kl"] for entry in log if "kl" in entry]
    assert len(log) == 20 and max(kls[2::2]) > 0  # of first inner steps, where the policy is the sampler
    if name == "GRPO":  # RLOO has no such metric
        generated = [entry for entry in log if f"{METRIC}/max" in entry]
        differences = {entry[f"{METRIC}/{kind}"] for entry in generated for kind in ("mean", "max")}
        assert len(generated) == 10 and (0.0 not in differences if is_plain else differences == {0.0})
    if not is_plain:
        assert kls[0] == 0.0
    if name == "GRPO" and not is_plain:
        ratios = [entry for entry in log if "sampling/importance_sampling_ratio/min" in entry]
        names = ("sampling/importance_sampling_ratio/min", "sampling/importance_sampling_ratio/max")
        assert {entry[one] for entry in ratios for one in names} == {1.0}


@pytest.mark.parametrize("mode", ["raw", None])
def test_trls_client_names_a_raw_server_and_has_ratios_of_1_with_the_default(
    mode: LogprobsMode | None,
    model_path: Path,
    tokenizer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from trl import GRPOConfig, GRPOTrainer
    from trl.generation import vllm_client, vllm_generation

    for module in (vllm_client, vllm_generation):
        monkeypatch.setattr(module, "is_vllm_available", lambda min_version=None: True)
    monkeypatch.setattr(vllm_client.VLLMClient, "init_communicator", lambda client, device=0: None)
    monkeypatch.setattr(vllm_client.VLLMClient, "update_named_params", lambda client, metadata, named: None)
    monkeypatch.setattr(logging.getLogger("trl"), "propagate", True)
    model = transformers.LlamaForCausalLM.from_pretrained(model_path)
    with running(model_path, ServerConfig(port=0, log_requests=False, enable_rl=True, logprobs_mode=mode)) as server:
        address = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": server.url}
        config = GRPOConfig(str(tmp_path), **HOT, **address, vllm_importance_sampling_mode="token_truncate")
        trainer = GRPOTrainer(model, sums, config, data(), None, tokenizer)
        assert ("raw_logprobs" in caplog.text) == (mode == "raw")
        if mode is None:
            trainer.train()
            assert ratios_of(trainer) == pytest.approx((1, 1), abs=CLOSE)


def checksum_of(model: transformers.LlamaForCausalLM) -> str:
    return weights_checksum((name, value.detach()) for name, value in model.named_parameters())


class Trainer:
    """What a backend reads of a trainer."""

    def __init__(self, kind: str = "NO", **args: Any) -> None:
        self.accelerator = SimpleNamespace(distributed_type=SimpleNamespace(name=kind))
        defaults = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_completion_length": 8}
        self.args, self.use_vllm = SimpleNamespace(**{**defaults, **args}), False


def test_unsupported_options_of_trl_are_refused_by_name(model_path: Path) -> None:
    with open_engine(model_path) as engine:
        with pytest.raises(ValueError, match=r"shards its weights \(FSDP\)"):
            use_engine(Trainer("FSDP"), engine)
        with pytest.raises(ValueError, match="vllm_structured_outputs_regex"):
            use_engine(Trainer(vllm_structured_outputs_regex="a+"), engine)
        with pytest.raises(ValueError, match="logprobs_mode must be 'processed', got 'raw'"):
            use_engine(Trainer(generation_kwargs={"logprobs_mode": "raw"}), engine)
        with pytest.raises(ValueError, match="guided"):
            use_engine(Trainer(generation_kwargs={"guided": 1}), engine)
        used = Trainer()
        used.use_vllm = True
        with pytest.raises(ValueError, match="use_vllm must be False"):
            use_engine(used, engine)
        backend = use_engine(Trainer(generation_kwargs={"min_tokens": 8, "seed": 2}), engine)
        with pytest.raises(ValueError, match="images"):
            backend.generate([[1]], [["a picture"]], 1)
        prompts = [[1, 2], [1, 2], [3], [1, 2]]
        again, ids, logprobs, tokens = backend.generate(prompts, None, 2)
        assert again == prompts and [len(row) for row in ids] == [8] * 4 and ids[0] != ids[1]
        assert [[[token] for token in row] for row in ids] == tokens
        assert all(len(one) == 1 and one[0] <= 0 for row in logprobs for one in row)
