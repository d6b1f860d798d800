"""`EngineGeneration`: an engine as the generation backend of TRL's trainers, in the trainer's process.

TRL (1.16, trl/generation/vllm_generation.py) calls two methods of an object for weights and for samples. With
`use_engine`, a trainer that was made without `use_vllm` uses `EngineGeneration`. Neither TRL nor vLLM is imported.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import groupby
from typing import Any, cast

import torch
from torch import Tensor

from nano_inference.engine import InferenceEngine
from nano_inference.rl.adapters import WRAPPER, adapter_tensors, plain_config
from nano_inference.rl.exact import exact_executor, with_values
from nano_inference.types import BadRequest, SamplingParams, TrainingSample

ADAPTER = "trl-policy"  # name in the engine of a trainer's adapter
_log = logging.getLogger(__name__)
_SHARDED = ("FSDP", "DEEPSPEED", "MEGATRON_LM")  # kinds of training in which no process has the whole weights


class EngineGeneration:
    """Generates for a trainer with an engine, which each process of a data-parallel trainer has of its own."""

    def __init__(self, engine: InferenceEngine, trainer: Any) -> None:
        """`trainer` is a trainer of TRL: GRPO, RLOO, or another that uses `VLLMGeneration`'s methods.

        Raises `ValueError` for a trainer whose options this backend does not have.
        """
        kind = getattr(trainer.accelerator.distributed_type, "name", "NO")
        if kind in _SHARDED:
            raise ValueError(
                f"the trainer shards its weights ({kind}): use SpmdEngine, or TRL's server mode and `serve --enable-rl`"
            )
        if getattr(trainer.args, "vllm_structured_outputs_regex", None) is not None:
            raise ValueError("vllm_structured_outputs_regex is not supported by this backend")
        self.engine, self._trainer = engine, trainer
        self.params = sampling_params(trainer.args)
        self.adapter: str | None = None  # the adapter in the engine that computes the policy; None: its weights do
        self._merges = False  # whether the engine has refused the trainer's adapter
        self._installed: tuple[Any, ...] | None = None  # `_state` of the weights in the engine

    def sync_weights(self) -> None:
        """Install the trainer's weights; of a model with a LoRA of PEFT, the adapter alone.

        One that the engine refuses (DoRA, `modules_to_save`) is merged for the duration. The first update has the
        weights under the adapter too, unless they are quantized: then the engine's are those of its checkpoint.
        """
        model = self._model
        if hasattr(model, "merge_adapter") and not self._merges:
            self._sync_adapter(model)
        if self.adapter is None:
            self.engine.update_weights(self.named_weights(), blocking=True)
        self._installed = self._state()

    def _sync_adapter(self, model: Any) -> None:
        (name, *others) = model.active_adapters
        is_first = self.adapter is None
        try:
            if others:
                raise BadRequest("adapter", f"the trainer has {len(others) + 1} active ones")
            config, tensors = plain_config(model.peft_config[name]), adapter_tensors(model, name)
            self.engine.load_adapter(ADAPTER, tensors, config=config, version=self._trainer.state.global_step)
        except BadRequest as error:
            if not is_first:
                raise
            self._merges = True
            _log.warning("the trainer's adapter is merged into the weights for each update: %s", error)
            return
        if is_first and all(one.is_floating_point() for one in model.parameters()):
            self.engine.update_weights(self.named_weights(is_merged=False), blocking=True)
        self.adapter = ADAPTER

    def sync_changes(self) -> None:
        """Install the trainer's weights if a step of the optimizer, or anything else, has changed them."""
        if self._installed is None or self._installed != self._state():
            self.sync_weights()

    def is_reference(self, model: Any) -> bool:
        """Return whether a model is the trainer's reference: another one, or its own with the adapters off."""
        model = self._trainer.accelerator.unwrap_model(model)
        if model is not self._model:
            return True
        if not hasattr(model, "get_model_status"):
            return False
        status = model.get_model_status()
        return status.enabled is not True or status.active_adapters == ["ref"]

    def is_base(self, model: Any) -> bool:
        """Return whether a reference is what the engine computes without the adapter."""
        model = self._trainer.accelerator.unwrap_model(model)
        return self.adapter is not None and model is self._model and model.get_model_status().enabled is not True

    @property
    def _model(self) -> Any:
        return self._trainer.accelerator.unwrap_model(self._trainer.model)

    def _state(self) -> tuple[Any, ...]:
        """Return the step (fused optimizers change no counter), the engine's version and torch's counters."""
        model = self._model
        counters = [(one.data_ptr(), one._version) for one in model.parameters() if one.requires_grad]
        return (self._trainer.state.global_step, self.engine.weight_info().version, *counters)

    def named_weights(self, *, is_merged: bool = True) -> Generator[tuple[str, Tensor]]:
        """Yield (name, tensor) of the trainer's model under the names of its checkpoint; adapters are merged."""
        model = self._model
        is_adapted = hasattr(model, "merge_adapter")
        if is_adapted and is_merged:
            model.merge_adapter()
        try:
            for name, parameter in model.named_parameters():
                plain = base_name(name, model.prefix) if is_adapted else name
                if plain is not None:
                    yield plain.replace(WRAPPER, ""), parameter.detach()
        finally:
            if is_adapted and is_merged:
                model.unmerge_adapter()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        images: Sequence[Any] | None,
        num_generations: int,
        profiler: AbstractContextManager[Any] | None = None,
    ) -> tuple[list[list[int]], list[list[int]], list[list[list[float]]], list[list[list[int]]]]:
        """Return prompts, completions, log-probabilities and their tokens [B][L][1], one sample for each prompt.

        Prompts that follow each other and are equal are one request. Raises `ValueError` for images.
        """
        if images is not None and any(images):
            raise ValueError("images: this engine generates from text only")
        groups = [(prompt, len(list(run))) for prompt, run in groupby(map(list, prompts))]

        def together() -> list[TrainingSample]:
            adapter = self.adapter
            asked = [
                self.engine.add_request(prompt, self.params, count, adapter=adapter, for_call=True)
                for prompt, count in groups
            ]
            pending = set(asked)
            while pending:
                pending -= set(self.engine.wait_for_any(pending))
            return [sample for request_id in asked for sample in self.engine.collect(request_id)]

        with profiler or nullcontext():
            samples = self.engine.exclusively(together)
        ids = [list(sample.completion_tokens) for sample in samples]
        logprobs = [[[logprob] for logprob in sample.logprobs] for sample in samples]
        return [list(prompt) for prompt in prompts], ids, logprobs, [[[token] for token in row] for row in ids]


class ExactLogprobs:
    """Mixin for TRL's GRPO and RLOO trainers: log-probabilities are the engine's, bit for bit, gradients TRL's own.

    `class Trainer(ExactLogprobs, GRPOTrainer)`, then `use_engine(trainer, engine)`: importance ratios of a first inner
    step are exactly 1. `use_engine(..., reference=engine.copy())` scores the reference model, so that a KL starts at 0;
    a trainer whose adapter the engine takes needs none.
    """

    engine_backend: EngineGeneration | None = None  # set by `use_engine`
    engine_reference: InferenceEngine | None = None

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, *args: Any, **options: Any
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return TRL's log-probabilities [B, logits_to_keep] with the engine's values."""
        inner = super()._get_per_token_logps_and_entropies  # type: ignore[misc]
        logps, entropies, aux_loss = inner(model, input_ids, attention_mask, logits_to_keep, *args, **options)
        backend = self.engine_backend
        if backend is None:
            raise ValueError("call use_engine(trainer, engine) before training")
        adapter = None
        if backend.is_reference(model):
            engine = self.engine_reference or (backend.engine if backend.is_base(model) else None)
            if engine is None:
                return logps, entropies, aux_loss
        else:
            engine = backend.engine
            backend.sync_changes()
            adapter = backend.adapter
        texts = [ids[mask == 1].tolist() for ids, mask in zip(input_ids, attention_mask, strict=True)]
        answer_mask = attention_mask[:, -logits_to_keep:] == 1
        starts = [len(text) - int(size) for text, size in zip(texts, answer_mask.sum(1), strict=True)]
        found = engine.score(texts, starts, temperature=cast(Any, self).temperature, adapter=adapter)
        values = logps.detach().clone()
        values[answer_mask] = torch.tensor([value for row in found for value in cast(list[float], row)]).to(values)
        return with_values(logps, values), entropies, aux_loss


def use_engine(trainer: Any, engine: InferenceEngine, reference: InferenceEngine | None = None) -> EngineGeneration:
    """Make a trainer of TRL generate with an engine, and correct for its log-probabilities; return the backend.

    The trainer must have been made with `use_vllm=False`. `reference` is the engine of the reference model, for a
    trainer with `ExactLogprobs`. Raises `ValueError` as `EngineGeneration` does.
    """
    if trainer.use_vllm:
        raise ValueError("use_vllm must be False: the engine takes vLLM's place")
    backend = EngineGeneration(engine, trainer)
    if isinstance(trainer, ExactLogprobs):
        for one in (engine, reference):
            if one is not None:
                exact_executor(one)
        if backend.params.repetition_penalty != 1:
            raise ValueError("repetition_penalty must be 1: TRL's own log-probabilities do not have it")
        # Of the whole distribution at the trainer's temperature, as TRL's: without what top-p, top-k and min-p exclude.
        backend.params = replace(backend.params, logprobs_mode="tempered")
        trainer.engine_backend, trainer.engine_reference = backend, reference
    elif reference is not None:
        raise ValueError("reference: the trainer's class must have ExactLogprobs")
    trainer.vllm_generation = backend
    # In the mode "server" TRL takes the context length from the model's configuration, not from vLLM. The last name has
    # no public form: TRL sets it together with its own backend.
    trainer.use_vllm, trainer.vllm_mode, trainer._last_loaded_step = True, "server", -1
    return backend


def sampling_params(args: Any) -> SamplingParams:
    """Return the sampling parameters of a trainer's arguments. Raises `ValueError` naming an unknown one.

    Log-probabilities are of the distribution sampled from, whatever the engine's mode: TRL takes them for those of its
    policy at the trainer's temperature when it computes importance ratios, and sets this mode in vLLM.
    """
    names = ("temperature", "top_p", "top_k", "repetition_penalty")
    fields: dict[str, Any] = {name: getattr(args, name) for name in names if getattr(args, name, None) is not None}
    fields["min_p"] = getattr(args, "min_p", None) or 0.0
    fields["max_tokens"] = args.max_completion_length
    fields |= {"logprobs_mode": "processed"} | (getattr(args, "generation_kwargs", None) or {})
    if fields["logprobs_mode"] != "processed":
        raise ValueError(f"generation_kwargs: logprobs_mode must be 'processed', got {fields['logprobs_mode']!r}")
    return SamplingParams.from_dict(fields)


def base_name(name: str, prefix: str) -> str | None:
    """Return the checkpoint's name of a PEFT model's parameter; None for a parameter of an adapter.

    `prefix` is the adapters' (`PeftModel.prefix`). The rules are those of TRL's `VLLMGeneration`.
    """
    name = name.removeprefix("base_model.model.").replace(".base_layer", "")
    if prefix in name or "original_module" in name:
        return None
    return name.replace("modules_to_save.default.", "")
