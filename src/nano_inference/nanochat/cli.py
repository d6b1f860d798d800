"""nanochat's commands: `chat --nanochat` and `models export`.

Imported for every `--help`, so it imports no slow modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Literal

from cyclopts import App, ArgumentCollection, Group, Parameter

from nano_inference.cli import commands
from nano_inference.cli.command import Command
from nano_inference.cli.commands import CachedName, PromptFlag, SystemFlag
from nano_inference.cli.fallback import BUILT_IN, drop_inherited, fill, is_on
from nano_inference.cli.options import (
    CHAT,
    COMMON,
    PLAIN,
    ChatFlags,
    CommonFlags,
    EngineFlags,
    OverrideFlag,
    SamplingFlags,
    TypedFields,
    flags,
)
from nano_inference.config import helped
from nano_inference.types import BadRequest

HEADING = "nanochat"
"""Heading of the options in --help."""
BASE = "(nanochat's base directory)"
"""Value of --model that means nanochat's base directory."""
_SHORT: Mapping[str, str] = {"source": "-i", "model_tag": "-g", "step": "-s"}
NANOCHATS_OWN: Mapping[str, str] = {
    **{"temperature": "0.6", "top_k": "50", "max_tokens": "256", "seed": "42"},
    **{"top_p": "1", "min_p": "0", "repetition_penalty": "1"},
}
"""Sampling defaults of nanochat's chat; they take precedence over the model's generation_config.json."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NanochatOptions:
    """Options of nanochat's chat: the checkpoint in its base directory."""

    nanochat: bool = helped(
        False,
        "chat with a checkpoint of nanochat's base directory ($NANOCHAT_BASE_DIR, or --model DIR), with nanochat's "
        "defaults: temperature 0.6, top-k 50, 256 tokens, seed 42; quit, exit and clear need no slash",
    )
    source: Literal["base", "mid", "sft", "rl"] | None = helped(None, "training stage; sft if there is one")
    model_tag: str | None = helped(None, "directory such as d20; default: the largest")
    step: int | None = helped(None, "step of the checkpoint; default: the last")
    device_type: Literal["cuda", "cpu", "mps", ""] = helped("", "same as --device")

    def __post_init__(self) -> None:
        named = [self.source, self.model_tag, self.step, self.device_type or None]
        if not self.nanochat and any(value is not None for value in named):
            raise BadRequest("--source, --model-tag, --step and --device-type require --nanochat")
        if self.device_type == "mps":
            raise BadRequest("--device-type mps: Apple GPUs are not supported; use cpu")


NanochatFlags = Annotated[NanochatOptions, flags(Group(HEADING), short=_SHORT)]
NOT_NANOCHAT = NanochatOptions()


def chat(
    *,
    system: SystemFlag = None,
    prompt: PromptFlag = None,
    chat_options: ChatFlags = CHAT,
    nanochat: NanochatFlags = NOT_NANOCHAT,
    engine: EngineFlags,
    sampling: SamplingFlags = PLAIN,
    common: CommonFlags = COMMON,
    typed: TypedFields,
) -> int:
    """Chat with a model in the terminal, as `cli.commands.chat`.

    With --nanochat the options are those of nanochat's chat_cli, with its defaults: -i -g -s -p -t -k -d.
    """
    if not nanochat.nanochat:
        return commands.chat(
            system=system,
            prompt=prompt,
            chat_options=chat_options,
            engine=engine,
            sampling=sampling,
            common=common,
            typed=typed,
        )
    from nano_inference.cli.chat import Options
    from nano_inference.cli.conversation import requested_sampling

    requested = requested_sampling(sampling, typed.fields)
    if chat_options.server is not None:
        raise BadRequest("--server and --nanochat exclude each other")
    from nano_inference.cli import local
    from nano_inference.nanochat.cli_work import chosen_checkpoint

    options = Options(system, prompt, has_bare_words=True, plain=chat_options.plain)
    return local.run(options, chosen_checkpoint(engine, nanochat), requested, common, typed)


def models_export(
    name: CachedName,
    directory: Annotated[str, Parameter(help="a directory that does not exist yet")],
    /,
    *,
    to: Annotated[
        Literal["hf", "safetensors", "nanochat"],
        Parameter(
            help="hf: a directory for Transformers (G0 only); safetensors: any generation; nanochat: its own .pt files"
        ),
    ] = "safetensors",
    override: OverrideFlag = (),
    common: CommonFlags = COMMON,
) -> int:
    """Write a nanochat model into a new directory, in another format."""
    from nano_inference.nanochat.cli_work import export_model

    return export_model(name, directory, to, override, common)


def fill_options(_app: App, _commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """With --nanochat, fill in the base directory and the sampling defaults for options not given.

    Without it, ignore nanochat's options from the environment or a file; typed ones are an error.
    """
    by_name = {argument.field_info.name: argument for argument in arguments}
    switch, model = by_name.get("nanochat"), by_name.get("model_path")
    if switch is None or model is None:
        return
    if not is_on(switch):
        drop_inherited([by_name[field.name] for field in fields(NanochatOptions) if field.name != "nanochat"])
        return
    if not model.tokens:
        fill(model, BASE, BUILT_IN)
    if by_name["server"].tokens:
        return  # refused by `chat`
    for name, value in NANOCHATS_OWN.items():
        if not by_name[name].tokens:
            fill(by_name[name], value, "nanochat's own default")


CHAT_COMMAND = Command(
    words="chat",
    target="nano_inference.nanochat.cli:chat",
    text="Chat with a model in the terminal.",
    fill=fill_options,
)
"""Replaces the built-in `chat`, which has no --nanochat."""
EXPORT_COMMAND = Command(
    words="models export",
    target="nano_inference.nanochat.cli:models_export",
    arguments=" NAME DIRECTORY",
    text="Write a nanochat model in another format.",
)
