"""A model opened for text: engine, tokenizer and chat template, with bars while it is fetched and loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from nano_inference.assemble import assemble
from nano_inference.cli.options import Common
from nano_inference.cli.place import fetch
from nano_inference.cli.prompts import Prompt
from nano_inference.cli.terminal import bar
from nano_inference.config import EngineConfig
from nano_inference.engine import InferenceEngine
from nano_inference.text.chat import ChatTemplate, Message, encode_chat, load_chat_template
from nano_inference.text.tokenizer import Tokenizer, load_tokenizer
from nano_inference.types import BadRequest, EngineDead, StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A running engine and what turns text into its ids and back."""

    engine: InferenceEngine
    tokenizer: Tokenizer
    template: ChatTemplate | None


@contextmanager
def open_session(config: EngineConfig, common: Common) -> Iterator[Session]:
    """Fetch and load the model of a configuration; the engine is shut down when the block ends."""
    path = fetch(config.model_path, common)
    config = replace(config, model_path=str(path))
    with bar("loading", is_bytes=True, quiet=common.quiet) as tell:
        parts = assemble(config, progress=tell)
    assert parts.checkpoint is not None, "assemble opens a checkpoint"
    tokenizer = load_tokenizer(parts.checkpoint.tokenizer)
    template = load_chat_template(parts.checkpoint.tokenizer, tokenizer)
    with InferenceEngine(config, parts=parts) as engine:
        yield Session(engine=engine, tokenizer=tokenizer, template=template)


def encode(session: Session, prompt: Prompt, *, system: str | None = None, raw: bool = False) -> list[int]:
    """Return a prompt's ids. Text goes through the model's chat template when it has one, unless `raw`."""
    if isinstance(prompt, tuple):
        return list(prompt)
    if isinstance(prompt, str) and system is None and (raw or session.template is None):
        return session.tokenizer.encode(prompt)
    if session.template is None or raw:
        raise BadRequest(
            "messages need a chat template" + (", which --raw leaves out" if raw else "; the model has none")
        )
    return encode_chat(session.template, session.tokenizer, with_system(prompt, system))


def with_system(prompt: str | list[Message], system: str | None) -> list[Message]:
    """Return a prompt as messages, behind a system message when there is one."""
    messages: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return messages if system is None else [{"role": "system", "content": system}, *messages]


def tick(engine: InferenceEngine) -> StepResult:
    """Run one step. Whatever fails in it is the engine's failure, never the user's: `EngineDead`."""
    try:
        return engine.tick()
    except Exception as error:
        raise EngineDead(f"the engine failed: {type(error).__name__}: {error}") from error
