"""`LLM`: the engine with the names, order and result fields of vLLM's offline class (vllm/entrypoints/llm.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nano_inference.build import chat_params
from nano_inference.config import EngineConfig
from nano_inference.engine import InferenceEngine
from nano_inference.text.dialogue import Dialogue, Rendering, require, text_of
from nano_inference.text.kinds import Message, Tokenizer
from nano_inference.types import BadRequest, FinishReason, SamplingParams, StopReason, TrainingSample

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, its token ids, or a dict with "prompt" or "prompt_token_ids"."""
Params = SamplingParams | Sequence[SamplingParams]
"""For all prompts, or one for each."""


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter, loaded from `lora_path` unless it is already; its name identifies it, `lora_int_id` has no effect."""

    lora_name: str
    lora_int_id: int
    lora_path: str


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's log-probability at one position."""

    logprob: float
    rank: int | None
    """From 1 for the most probable token; None for a sampled token that is not among the requested ones."""
    decoded_token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One sample. `logprobs` has for each token itself and the `SamplingParams.logprobs` most probable ones."""

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: FinishReason
    stop_reason: StopReason | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """A prompt and its samples; `prompt` is None if token ids were given."""

    request_id: str
    prompt: str | None
    prompt_token_ids: Sequence[int]
    outputs: list[CompletionOutput]
    finished: bool = True


class LLM:
    """Owns an engine, `llm_engine`: `LLM("default").generate(["1, 2, 3,"])[0].outputs[0].text`."""

    def __init__(
        self,
        model: str | Path = "default",
        *,
        dtype: str = "auto",
        seed: int | None = None,
        tensor_parallel_size: int = 1,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        enable_lora: bool = False,
        max_loras: int | None = None,
        max_lora_rank: int | None = None,
        enforce_eager: bool = False,
    ) -> None:
        """Load a model: a directory, a GGUF file, a hub id or a known name. `EngineConfig` documents the options.

        `enforce_eager` has no effect: CUDA graphs change no result; nor `enable_lora`: adapters always work. Raises
        `ModelError` and `ValueError`.
        """
        fixed = {"model_path": str(model), "dtype": dtype, "seed": seed, "tensor_parallel": tensor_parallel_size}
        sizes = {
            "max_model_len": max_model_len,
            "max_batch_size": max_num_seqs,
            "max_tokens_per_batch": max_num_batched_tokens,
            "max_adapters": max_loras,
            "max_adapter_rank": max_lora_rank,
        }
        given = {name: value for name, value in sizes.items() if value is not None}
        self.llm_engine = InferenceEngine(EngineConfig.from_dict({**fixed, **given}))

    def get_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer."""
        return self.llm_engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | None = None,
        *,
        n: int = 1,
    ) -> list[RequestOutput]:
        """Continue texts or lists of token ids, `n` samples each. Raises `BadRequest`."""
        is_single = isinstance(prompts, str | Mapping) or (bool(prompts) and isinstance(prompts[0], int))
        given: Any = [prompts] if is_single else list(prompts)
        texts = [one.get("prompt") if isinstance(one, Mapping) else one for one in given]
        encode = self.get_tokenizer().encode
        ids = [encode(text) if isinstance(text, str) else _ids(one) for text, one in zip(texts, given, strict=True)]
        return self._run(ids, texts, sampling_params or SamplingParams(), n, use_tqdm, lora_request)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | None = None,
        *,
        n: int = 1,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several. Without `sampling_params` the model's defaults for chats apply."""
        engine = self.llm_engine
        dialogue = require(engine.parts.load_dialogue())
        conversations: Any = [messages] if messages and isinstance(messages[0], Mapping) else messages
        ids = [dialogue.encode(one, Rendering(tools=tools)) for one in conversations]
        params = sampling_params or chat_params(engine.parts, engine.config)
        return self._run(ids, ids, params, n, use_tqdm, lora_request, dialogue)

    def _run(
        self,
        ids: list[Any],
        texts: list[Any],
        params: Params,
        n: int,
        is_shown: bool,
        lora: LoRARequest | None,
        dialogue: Dialogue | None = None,
    ) -> list[RequestOutput]:
        """Generate with a progress bar of samples; `dialogue` is that of chats."""
        from rich.console import Console  # not needed by users of the engine
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        loaded = {(one.name, one.source) for one in self.llm_engine.adapters()}
        if lora is not None and (lora.lora_name, lora.lora_path) not in loaded:
            self.llm_engine.load_adapter(lora.lora_name, lora.lora_path)
        columns = (TextColumn("Processed prompts"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), disable=not is_shown) as bar:
            task = bar.add_task("", total=len(ids) * n)
            samples = self.llm_engine.generate(
                ids,
                params,
                n,
                program=dialogue.tool if dialogue is not None else None,
                adapter=None if lora is None else lora.lora_name,
                progress=lambda result: bar.advance(task, len(result.samples)),
            )
        outputs = []
        for index, (prompt, text) in enumerate(zip(ids, texts, strict=True)):
            own = params if isinstance(params, SamplingParams) else params[index]
            answers = samples[index * n : (index + 1) * n]
            outputs.append(
                RequestOutput(
                    request_id=str(answers[0].request_id),
                    prompt=text if isinstance(text, str) else None,
                    prompt_token_ids=prompt,
                    outputs=[_completion(self.get_tokenizer(), dialogue, one, own) for one in answers],
                )
            )
        return outputs


def _ids(prompt: Any) -> list[int]:
    ids = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else prompt
    if not isinstance(ids, list | tuple):
        raise BadRequest("prompts", f"a prompt is a text, token ids or a dict with one of both, got {prompt!r:.80}")
    return list(ids)


def _completion(
    tokenizer: Tokenizer, dialogue: Dialogue | None, sample: TrainingSample, params: SamplingParams
) -> CompletionOutput:
    logprobs: list[dict[int, Logprob]] = []
    for token, logprob, tops in zip(sample.completion_tokens, sample.logprobs, sample.top_logprobs or (), strict=False):
        ranked = sorted(tops, key=lambda one: -one.logprob)
        found = {one.token: (one.logprob, rank) for rank, one in enumerate(ranked, 1)}
        entries = {token: (logprob, None), **found}
        logprobs.append({one: Logprob(*values, tokenizer.decode([one])) for one, values in entries.items()})
    return CompletionOutput(
        index=sample.sample_index,
        text=text_of(
            tokenizer, dialogue.tool if dialogue is not None else None, sample, tuple(params.stop), raw=dialogue is None
        ),
        token_ids=sample.completion_tokens,
        cumulative_logprob=sum(sample.logprobs),
        logprobs=None if sample.top_logprobs is None else logprobs,
        finish_reason=sample.finish_reason,
        stop_reason=sample.stop_reason,
    )
