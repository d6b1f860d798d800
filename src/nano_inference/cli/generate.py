"""`generate`: one streamed sample, or several as one batch."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from typing import Any, NamedTuple

from nano_inference.cli.arguments import Typed
from nano_inference.cli.local import (
    Session,
    cut_by,
    encode,
    open_session,
    stream_answer,
    with_chat_defaults,
    with_model_defaults,
)
from nano_inference.cli.options import Common
from nano_inference.cli.place import Prompt
from nano_inference.cli.sampling import Sampling
from nano_inference.cli.terminal import Interrupts, bar, note
from nano_inference.config import EngineConfig
from nano_inference.text.dialogue import spelled, text_of
from nano_inference.types import BadRequest, EngineDead, SamplingParams, StepResult, TrainingSample

_INTERRUPTED = 130


class Options(NamedTuple):
    """Options of the command."""

    num_samples: int
    raw: bool
    system: str | None
    as_json: bool


def run(
    prompts: list[Prompt], options: Options, config: EngineConfig, sampling: Sampling, common: Common, typed: Typed
) -> int:
    """Generate for all prompts and print; return the exit code."""
    if options.num_samples < 1:
        raise BadRequest("--n", f"must be >= 1, got {options.num_samples}")
    needs_text = not options.as_json or bool(sampling.params.stop) or not all(isinstance(one, tuple) for one in prompts)
    with open_session(config, common, typed, needs_text=needs_text) as session:
        encoded = [encode(session, prompt, system=options.system, raw=options.raw) for prompt in prompts]
        if options.as_json:
            sampling = with_model_defaults(session, sampling, common.quiet)
        else:
            sampling = with_chat_defaults(session, config.model_path, sampling, common.quiet, "options change them")
        return answer_all(session, encoded, options, sampling.params, common)


def answer_all(
    session: Session, encoded: list[list[int]], options: Options, params: SamplingParams, common: Common
) -> int:
    """Generate for all prompts with a loaded model and print; return the exit code. Raises `EngineDead`."""
    if len(encoded) == options.num_samples == 1 and not options.as_json:
        raw, quiet = options.raw, common.quiet
        with Interrupts() as interrupts:
            answer = stream_answer(session, encoded[0], params, interrupts, write_text, raw=raw, quiet=quiet)
            print()
        print_limits(session, [answer.sample], quiet)
        note(answer.stats.summary(), quiet)
        return _INTERRUPTED if interrupts.pressed else 0
    samples = _run_batch(session, encoded, options, params, common)
    for i, sample in enumerate(samples):
        number = i // options.num_samples
        text = None
        if session.found is not None:
            text = text_of(session.found, session.tool, sample, tuple(params.stop), raw=options.raw)
        if options.as_json:
            print(json.dumps(sample_json(sample, number, text)))
        else:
            print(f"--- prompt {number + 1}, sample {sample.sample_index + 1} ---\n{text}")
    return 0


def print_limits(session: Session, samples: list[TrainingSample], quiet: bool) -> None:
    """Print to stderr which length limits ended samples, and how many."""
    for reason, count in Counter(filter(None, (cut_by(session, sample) for sample in samples))).items():
        note(f"[cut off: {reason}]" if len(samples) == 1 else f"[{count} cut off: {reason}]", quiet)


def write_text(text: str) -> None:
    """Write a piece of an answer to stdout and flush."""
    sys.stdout.write(spelled(text))
    sys.stdout.flush()


def _run_batch(
    session: Session, prompts: list[list[int]], options: Options, params: SamplingParams, common: Common
) -> list[TrainingSample]:
    """Run all prompts as one batch, with a progress bar of finished samples."""
    total = len(prompts) * options.num_samples
    done = 0
    start = time.perf_counter()

    def on_step(result: StepResult) -> None:
        nonlocal done
        done += len(result.samples)
        progress(done, total)

    with bar("generating", quiet=common.quiet) as progress:
        try:
            samples = session.engine.generate(
                prompts, params, options.num_samples, program=session.tool, progress=on_step
            )
        except BadRequest:
            raise
        except Exception as error:
            raise EngineDead(f"the engine failed: {type(error).__name__}: {error}") from error
    print_limits(session, samples, common.quiet)
    seconds, num_new = time.perf_counter() - start, sum(len(sample.completion_tokens) for sample in samples)
    num_prompt = sum(len(sample.prompt_tokens) for sample in samples)
    num_cached = sum(sample.num_cached_tokens for sample in samples)
    note(
        f"[{len(samples)} samples, {num_prompt} prompt tokens ({num_cached} cached), {num_new} generated, "
        f"{seconds:.2f} s, {num_new / seconds:.1f} tokens/s]",
        common.quiet,
    )
    return samples


def sample_json(sample: TrainingSample, prompt_index: int, text: str | None) -> dict[str, Any]:
    """Return the object that `--json` prints for a sample; optional fields only if they were requested.

    `text` is None, null in the output, for token ids of a model without a tokenizer.
    """
    out: dict[str, Any] = {
        "prompt_index": prompt_index,
        "sample_index": sample.sample_index,
        "text": text,
        "prompt_token_ids": sample.prompt_tokens,
        "token_ids": sample.completion_tokens,
        "logprobs": sample.logprobs,
        "mask": sample.mask,
        "token_versions": sample.token_versions,
        "finish_reason": sample.finish_reason,
        "stop_reason": sample.stop_reason,
        "num_cached_tokens": sample.num_cached_tokens,
    }
    for name in ("raw_logprobs", "sampling_masks", "top_logprobs", "prompt_logprobs", "prompt_top_logprobs"):
        if getattr(sample, name) is not None:
            out[name] = getattr(sample, name)
    return out
