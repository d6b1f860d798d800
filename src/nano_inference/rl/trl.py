"""`EngineGeneration`: an engine as the generation backend of TRL's trainers, in the trainer's process.

TRL (1.16, trl/generation/vllm_generation.py) calls two methods of an object for weights and for samples. With
`use_engine`, a trainer that was made without `use_vllm` uses `EngineGeneration`. Neither TRL nor vLLM is imported.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby
from typing import Any

from torch import Tensor

from nano_inference.engine import InferenceEngine
from nano_inference.types import SamplingParams, TrainingSample

_WRAPPER = "_checkpoint_wrapped_module."  # prefix of parameters whose activations are checkpointed
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
        self._params = sampling_params(trainer.args)

    def sync_weights(self) -> None:
        """Install the trainer's weights; adapters of PEFT are merged for the duration."""
        self.engine.update_weights(self.named_weights(), blocking=True)

    def named_weights(self) -> Generator[tuple[str, Tensor]]:
        """Yield (name, tensor) of the trainer's model under the names of its checkpoint."""
        model = self._trainer.accelerator.unwrap_model(self._trainer.model)
        is_adapted = hasattr(model, "merge_adapter")
        if is_adapted:
            model.merge_adapter()
        try:
            for name, parameter in model.named_parameters():
                plain = base_name(name, model.prefix) if is_adapted else name
                if plain is not None:
                    yield plain.replace(_WRAPPER, ""), parameter.detach()
        finally:
            if is_adapted:
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
            asked = [self.engine.add_request(prompt, self._params, count, for_call=True) for prompt, count in groups]
            pending = set(asked)
            while pending:
                pending -= set(self.engine.wait_for_any(pending))
            return [sample for request_id in asked for sample in self.engine.collect(request_id)]

        with profiler or nullcontext():
            samples = self.engine.exclusively(together)
        ids = [list(sample.completion_tokens) for sample in samples]
        logprobs = [[[logprob] for logprob in sample.logprobs] for sample in samples]
        return [list(prompt) for prompt in prompts], ids, logprobs, [[[token] for token in row] for row in ids]


def use_engine(trainer: Any, engine: InferenceEngine) -> EngineGeneration:
    """Make a trainer of TRL generate with an engine, and correct for its log-probabilities; return the backend.

    The trainer must have been made with `use_vllm=False`. Raises `ValueError` as `EngineGeneration` does.
    """
    if trainer.use_vllm:
        raise ValueError("use_vllm must be False: the engine takes vLLM's place")
    backend = EngineGeneration(engine, trainer)
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
