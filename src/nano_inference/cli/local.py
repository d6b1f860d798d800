"""A loaded model for text, with progress bars while it is loaded; one streamed answer; the chat with it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from nano_inference.build import assemble
from nano_inference.cli.arguments import Typed
from nano_inference.cli.options import Common
from nano_inference.cli.place import Prompt, fetch
from nano_inference.cli.sampling import CHAT_HINT, AnswerStats, Sampling, print_defaults, with_defaults
from nano_inference.cli.terminal import Interrupts, bar, note
from nano_inference.config import EngineConfig
from nano_inference.engine import InferenceEngine
from nano_inference.loading.catalog import catalog_sampling
from nano_inference.loading.formats import Checkpoint, generation_fields, sampling_defaults
from nano_inference.loading.kinds import installed_kinds
from nano_inference.text import stream
from nano_inference.text.chat import Message
from nano_inference.text.dialogue import Dialogue, load_dialogue, shown, spelled
from nano_inference.text.generation_config import chat_defaults
from nano_inference.text.kinds import Tool
from nano_inference.text.stream import repeats
from nano_inference.text.tokenizer import Tokenizer, kind_of
from nano_inference.types import BadRequest, Delta, EngineDead, SamplingParams, StepResult, TrainingSample

_NOTHING = Typed()


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A running engine with its tokenizer and chat template."""

    engine: InferenceEngine
    found: Tokenizer | None  # None: the model has none, and none is needed
    dialogue: Dialogue | None  # encodes messages; None for a model without a chat template

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of a session that was opened for text."""
        assert self.found is not None, "open_session refuses a model without a tokenizer unless text is not needed"
        return self.found

    @property
    def tool(self) -> Tool | None:
        """Tool that the model can call while it answers."""
        return None if self.dialogue is None else self.dialogue.tool


@contextmanager
def open_session(
    config: EngineConfig,
    common: Common,
    typed: Typed = _NOTHING,
    *,
    check: Callable[[Dialogue | None], None] = lambda dialogue: None,
    needs_text: bool = True,
) -> Iterator[Session]:
    """Fetch and load the model of a configuration; the engine is shut down when the block ends.

    `check` is called before the weights are loaded, and may raise `BadRequest`. Without `needs_text` the model may lack
    a tokenizer. Raises `ModelError`.
    """
    kinds = installed_kinds()
    path = fetch(config.model_path, common)
    config = replace(config, model_path=str(path))
    tokenizer: Tokenizer | None = None
    dialogue: Dialogue | None = None

    def on_open(checkpoint: Checkpoint, load: Callable[[], Tokenizer]) -> None:
        nonlocal tokenizer, dialogue
        source = checkpoint.tokenizer
        if not needs_text and source.gguf is None and kind_of(Path(source.path), kinds.tokenizers) is None:
            return
        tokenizer = load()
        dialogue = load_dialogue(source, tokenizer, kinds.tokenizers)
        check(dialogue)

    with bar("loading", is_bytes=True, quiet=common.quiet) as progress:
        parts = assemble(config, progress=progress, on_open=on_open, kinds=kinds)
    assert parts.checkpoint is not None and parts.executor is not None, "assemble opens a checkpoint"
    with bar("warming up", quiet=common.quiet or not parts.is_on_cuda) as progress:
        parts.executor.warm_up(progress)
    # What the files do not say, and what limits the context, is printed.
    if (inferred := parts.checkpoint.inferred) is not None:
        note(f"[{inferred.headline}: {parts.checkpoint.path}]", common.quiet)
        for text in inferred.notes:
            note(f"[{text}]", common.quiet)
        for warning in inferred.warnings:
            note(f"[{warning}]")
    wanted, context = config.max_model_len if "max_model_len" in typed.fields else 0, parts.max_model_len
    num_slots = parts.kv.num_blocks * parts.kv.block_size
    if wanted > context:
        note(f"[context {context} tokens, the model's limit: --max-model-len {wanted} is more]", common.quiet)
    if num_slots < context:
        size = "the size of the KV cache (--kv-cache-bytes sets it)"
        note(f"[a request has at most {num_slots} tokens, {size}]", common.quiet)
    with InferenceEngine(config, parts=parts) as engine:
        yield Session(engine=engine, found=tokenizer, dialogue=dialogue)


def with_model_defaults(session: Session, sampling: Sampling, quiet: bool) -> Sampling:
    """Return the sampling with the model's defaults for fields that the user did not set, and print these.

    Raises `ModelError` for invalid defaults.
    """
    checkpoint = session.engine.parts.checkpoint
    assert checkpoint is not None, "assemble opens a checkpoint"
    own = sampling_defaults(checkpoint, without=sampling.named)
    if own:
        defaults = ", ".join(f"{name} {value}" for name, value in own.items())
        note(f"[{defaults}: the model's defaults (generation_config.json)]", quiet)
    return sampling._replace(params=replace(sampling.params, **own))


def with_chat_defaults(
    session: Session, model: str, sampling: Sampling, quiet: bool, hint: str = CHAT_HINT
) -> Sampling:
    """Return the sampling with chat defaults for fields that the user did not set, and print these.

    `model` is the model as the user named it, `hint` how to change defaults. Raises `ModelError` for invalid ones.
    """
    checkpoint = session.engine.parts.checkpoint
    assert checkpoint is not None, "assemble opens a checkpoint"
    sampling_defaults(checkpoint, without=sampling.named)  # refuses invalid values of fields that are used
    found = chat_defaults(generation_fields(checkpoint), catalog_sampling(model))
    print_defaults(sampling, found.sampling, found.source, quiet, hint)
    return with_defaults(sampling, found.sampling)


def encode(session: Session, prompt: Prompt, *, system: str | None = None, raw: bool = False) -> list[int]:
    """Return a prompt's token ids, through the model's chat template if it has one, unless `raw`."""
    if isinstance(prompt, tuple):
        return list(prompt)
    if isinstance(prompt, str) and system is None and (raw or session.dialogue is None):
        return session.tokenizer.encode(prompt)
    if session.dialogue is None or raw:
        raise BadRequest(
            "", "messages need a chat template" + (", which --raw disables" if raw else "; the model has none")
        )
    first: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    turns: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return session.dialogue.encode([*first, *turns])


def tick(engine: InferenceEngine) -> StepResult:
    """Run one step. Raises `EngineDead` for any exception in it."""
    try:
        return engine.tick()
    except Exception as error:
        raise EngineDead(f"the engine failed: {type(error).__name__}: {error}") from error


# ---- one answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A finished answer."""

    text: str
    sample: TrainingSample
    stats: AnswerStats
    is_repetition: bool  # True if the answer was ended because it repeats itself


def stream_answer(
    session: Session,
    prompt: list[int],
    params: SamplingParams,
    interrupts: Interrupts,
    write: Callable[[str], None],
    *,
    raw: bool = False,
    quiet: bool = False,
    ends_repetition: bool = False,
) -> Answer:
    """Generate one sample and stream its text to `write`; Ctrl-C ends it early, and so does a repetition if asked.

    The text contains the calculator's marks, which `text.dialogue` interprets.
    """
    start = time.perf_counter()
    request_id = session.engine.add_request(prompt, params, program=session.tool)
    state = stream.start(stops=tuple(params.stop), drop_space=session.tokenizer.drops_space and not raw)
    first, text, sample, ids, is_repetition = 0.0, "", None, list[int](), False
    for delta in _deltas(session.engine, len(prompt), interrupts, quiet):
        first = first or time.perf_counter() - start
        sample = delta.sample
        is_cut = sample is not None and sample.finish_reason != "stop"
        ended_by_token = sample is not None and not is_cut and not isinstance(sample.stop_reason, str)
        visible = delta.token_ids[:-1] if ended_by_token else delta.token_ids
        state, piece = stream.push(state, shown(session.tokenizer, session.tool, visible, is_cut=is_cut))
        write(piece)
        text += spelled(piece)
        ids += delta.token_ids
        is_repetition = ends_repetition and sample is None and repeats(ids)
        if is_repetition:
            break
    state, piece = stream.finish(state)
    write(piece)
    if sample is None:
        (sample,) = session.engine.abort(request_id)
    session.engine.step()  # removes the finished sample from the engine, which `delta.sample` has already returned
    last = sample.version_spans[-1] if sample.version_spans else None
    stats = AnswerStats(
        num_prompt=len(sample.prompt_tokens),
        num_cached=sample.num_cached_tokens,
        num_new=len(sample.completion_tokens),
        first_token_after=first,
        seconds=time.perf_counter() - start,
        seed=sample.seed,
        version=None if last is None or not last.version else str(last.label or last.version),
    )
    return Answer(text=text + spelled(piece), sample=sample, stats=stats, is_repetition=is_repetition)


def _deltas(engine: InferenceEngine, num_prompt: int, interrupts: Interrupts, quiet: bool) -> Iterator[Delta]:
    """Run steps and yield their deltas, until the sample ends or Ctrl-C is pressed."""
    is_short = num_prompt <= engine.config.max_tokens_per_batch
    with bar("reading the prompt", quiet=quiet or is_short) as progress:
        result, done = tick(engine), 0
        while not result.deltas and not interrupts.pressed:
            done += result.stats.num_computed
            progress(done, num_prompt)
            result = tick(engine)
    while True:
        yield from result.deltas
        if interrupts.pressed or any(delta.sample for delta in result.deltas):
            return
        result = tick(engine)


def cut_by(session: Session, sample: TrainingSample) -> str | None:
    """Return the length limit that ended a sample; None for another finish reason."""
    if sample.finish_reason != "length":
        return None
    limits = session.engine.limits
    num_slots = limits.num_blocks * limits.block_size
    if len(sample.prompt_tokens) + len(sample.completion_tokens) < min(limits.max_model_len, num_slots):
        return f"--max-tokens {len(sample.completion_tokens)} reached"
    what = "context" if limits.max_model_len <= num_slots else "KV cache"
    return f"prompt and answer fill the {what} of {min(limits.max_model_len, num_slots)} tokens"
