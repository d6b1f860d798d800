"""A chat with an engine in this process."""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rich.filesize import decimal

from nano_inference.cli.arguments import DEFAULT, Typed
from nano_inference.cli.chat import loop
from nano_inference.cli.chat.conversation import NUM_ALTERNATIVES, Piece, Question, Reply, ShownToken, Write, fit_turns
from nano_inference.cli.local import Session, cut_by, encode, open_session, stream_answer, with_chat_defaults
from nano_inference.cli.options import ChatOptions, Common
from nano_inference.cli.sampling import Sampling
from nano_inference.cli.terminal import Interrupts
from nano_inference.config import EngineConfig
from nano_inference.loading.catalog import find_builtin, find_wheel
from nano_inference.text import stream
from nano_inference.text.chat import Message
from nano_inference.text.dialogue import Dialogue, PartKind, parts_of, require
from nano_inference.types import BadRequest, SamplingParams, TrainingSample

_NUM_SEEDS = 1_000_000


def run(options: ChatOptions, config: EngineConfig, sampling: Sampling, common: Common, typed: Typed) -> int:
    """Load the model and chat with it; return the exit code."""

    def check(dialogue: Dialogue | None) -> None:
        if dialogue is None:
            name, model = config.model_path, f" --model {shlex.quote(config.model_path)}"
            raise BadRequest(
                "",
                f"{name} is a base model: it has no chat template and only continues texts; "
                f"nano-inference generate{'' if name == DEFAULT else model} 'Once upon a time' does that",
            )

    with open_session(config, common, typed, check=check) as session:
        backend = LocalBackend(session, config.model_path, common.quiet)
        sampling = with_chat_defaults(session, config.model_path, sampling, common.quiet)
        return loop.run(options, backend, sampling, common)


@dataclass(frozen=True, slots=True)
class LocalBackend:
    """Answers with an engine in this process."""

    session: Session
    name: str  # the model as the user named it
    quiet: bool = False

    @property
    def facts(self) -> Mapping[str, str]:
        """Facts that /model prints."""
        config, parts = self.session.engine.config, self.session.engine.parts
        checkpoint, executor = parts.checkpoint, parts.executor
        assert checkpoint is not None and executor is not None, "assemble opens a checkpoint and loads it"
        known = find_wheel(self.name) or find_builtin(self.name)
        code = "torch" if executor.code == "torch" else f"kernels in C for {executor.code}"
        size = decimal(executor.weights.num_bytes)
        return {
            "model": f"{self.name if known is None else known.name} ({checkpoint.config.architecture})",
            "parameters": f"{checkpoint.num_parameters:,}",
            "file": str(checkpoint.path),
            "precision": f"{config.dtype} ({checkpoint.dtype} in the file), {size} in memory",
            "context": f"{parts.max_model_len} tokens",
            "backend": f"{code}, device {executor.device}, cache {config.cache_type}",
        }

    def count(self, turns: tuple[Message, ...], system: str | None) -> int | None:
        """Return the number of tokens of the conversation's prompt."""
        return len(encode(self.session, list(turns), system=system)) if turns else 0

    def switch(self, model: str) -> Mapping[str, Any]:
        """Raise `BadRequest`: one model is loaded."""
        raise BadRequest("", "/model NAME chooses among the models of a server: start the chat with --server")

    def answer(self, question: Question, interrupts: Interrupts, write: Write) -> Reply:
        """Answer; the oldest turns are dropped if the context is too short."""
        params = question.sampling.params
        if params.seed is None:  # of at most six digits, so that it can be typed
            params = replace(params, seed=secrets.randbelow(_NUM_SEEDS))
        params = with_alternatives(params) if question.has_tokens else params
        prompt, kept = fit_to_context(self.session, question.system, question.turns, params)
        inside: PartKind = "text"

        def take(text: str) -> None:
            nonlocal inside
            parts, inside = parts_of(text, inside, with_marks=True)
            write([Piece(part.text, part.type == "python_output") for part in parts])

        answer = stream_answer(self.session, prompt, params, interrupts, take, quiet=self.quiet, ends_repetition=True)
        sample, stats = answer.sample, answer.stats
        return Reply(
            message=require(self.session.dialogue).answer(sample.completion_tokens, answer.text),
            kept=kept,
            finish_reason="repetition" if answer.is_repetition else sample.finish_reason,
            cut_by=cut_by(self.session, sample),
            stats=stats if params.temperature else stats._replace(seed=None),  # greedy: no seed
            tokens=shown_tokens(self.session, sample) if question.has_tokens else (),
        )


def with_alternatives(params: SamplingParams) -> SamplingParams:
    """Return parameters that request alternatives, by default of the raw distribution."""
    return replace(
        params,
        logprobs=max(NUM_ALTERNATIVES, params.logprobs or 0),
        logprobs_mode=params.logprobs_mode or "raw",
    )


def shown_tokens(session: Session, sample: TrainingSample) -> tuple[ShownToken, ...]:
    """Return a sample's tokens; their texts concatenate to the answer, with special tokens as their names."""
    tokenizer = session.tokenizer

    def special(token: int) -> str | None:
        """Return the name of a special or unknown token; None for other tokens."""
        if token >= tokenizer.vocab_size:
            return f"<token {token}>"
        return tokenizer.token_text(token) if token in tokenizer.special_ids else None

    state, out = stream.start(), []
    tops = sample.top_logprobs or ((),) * len(sample.completion_tokens)
    for token, logprob, mask, top in zip(sample.completion_tokens, sample.logprobs, sample.mask, tops, strict=True):
        text = special(token)
        if text is None:
            state, text = stream.push(state, tokenizer.token_bytes(token))
        others = []
        for one in top:
            name = special(one.token)
            if name is None:  # a single token's incomplete characters are escaped
                name = tokenizer.token_bytes(one.token).decode("utf-8", "backslashreplace")
            others.append((name, one.logprob))
        out.append(ShownToken(text, logprob, not mask, tuple(others)))
    return tuple(out)


def fit_to_context(
    session: Session, system: str | None, turns: tuple[Message, ...], params: SamplingParams
) -> tuple[list[int], tuple[Message, ...]]:
    """Return the prompt of a conversation and its turns, without the oldest ones if the context has no room."""
    prompt: list[int] = []

    def count(turns: tuple[Message, ...]) -> int:
        nonlocal prompt
        prompt = encode(session, list(turns), system=system)
        return len(prompt)

    kept = fit_turns(turns, params.max_tokens, session.engine.parts.max_model_len, count)
    return prompt, kept
