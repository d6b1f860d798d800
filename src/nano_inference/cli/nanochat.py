"""nanochat's commands: `chat --nanochat` and `models export`.

Imported for every `--help`, so it imports no slow modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, ArgumentCollection, Group, Parameter

from nano_inference.cli import commands
from nano_inference.cli.arguments import BUILT_IN, fill
from nano_inference.cli.command import Command
from nano_inference.cli.commands import CachedName
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
from nano_inference.config import EngineConfig, helped
from nano_inference.support.files import exists, path_of
from nano_inference.types import BadRequest, ModelError

BASE = "(nanochat's base directory)"  # value of --model that means nanochat's base directory
_ROUNDED = (
    "[rotary tables of this generation are bfloat16: Transformers rounds them if it computes in bfloat16; in float32 "
    "its logits differ by about 1e-2]"
)
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
            raise BadRequest("", "--source, --model-tag, --step and --device-type require --nanochat")
        if self.device_type == "mps":
            raise BadRequest("", "--device-type mps: Apple GPUs are not supported; use cpu")


NanochatFlags = Annotated[NanochatOptions, flags(Group("nanochat", sort_key=4), short=_SHORT)]
NOT_NANOCHAT = NanochatOptions()


def chat(
    *,
    chat_options: ChatFlags = CHAT,
    nanochat: NanochatFlags = NOT_NANOCHAT,
    engine: EngineFlags,
    sampling: SamplingFlags = PLAIN,
    common: CommonFlags = COMMON,
    typed: TypedFields,
) -> int:
    """Chat with a model in the terminal; each line of piped input is one message.

    The first Ctrl-C stops an answer, the second quits; Ctrl-D quits. /help lists the slash commands.
    With --server, a running OpenAI-compatible server answers; --model then selects one of its models.
    With --nanochat the options are those of nanochat's chat_cli, with its defaults: -i -g -s -p -t -k -d.

    nano-inference chat -m Qwen/Qwen3-0.6B -t 0.7
    echo "Why is the sky blue?" | nano-inference chat
    """
    if nanochat.nanochat:
        if chat_options.server is not None:
            raise BadRequest("", "--server and --nanochat exclude each other")
        engine, chat_options = _chosen_checkpoint(engine, nanochat), replace(chat_options, has_bare_words=True)
    return commands.chat(chat_options=chat_options, engine=engine, sampling=sampling, common=common, typed=typed)


def _chosen_checkpoint(config: EngineConfig, wishes: NanochatOptions) -> EngineConfig:
    """Return the configuration with the path of the chosen checkpoint, and the chosen device."""
    from nano_inference.build import environment
    from nano_inference.loading.catalog import find_builtin
    from nano_inference.nanochat.files import find_files, nanochat_home
    from nano_inference.nanochat.format import is_exported

    builtin = find_builtin(config.model_path)
    named = path_of(config.model_path, "model") if builtin is None else builtin.directory
    base = nanochat_home(environment()) if config.model_path == BASE else named
    if not exists(base):
        raise ModelError(f"{base}: no such directory; set NANOCHAT_BASE_DIR or --model to nanochat's base directory")
    files = find_files(base, source=wishes.source, model_tag=wishes.model_tag, step=wishes.step)
    is_named = any(value is not None for value in (wishes.source, wishes.model_tag, wishes.step))
    if files is None and (is_named or not is_exported(base)):
        raise ModelError(f"{base}: contains no nanochat checkpoint")
    path = base if files is None else files.weights
    return replace(config, model_path=str(path), device=wishes.device_type or config.device)


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
    from nano_inference.cli.place import fetch, tokenizer_source
    from nano_inference.cli.terminal import note
    from nano_inference.loading.checkpoint import open_checkpoint
    from nano_inference.nanochat.export import export_hf, export_nanochat, export_safetensors
    from nano_inference.nanochat.files import TOKENIZER_FILES

    exporters = {"hf": export_hf, "safetensors": export_safetensors, "nanochat": export_nanochat}
    path = fetch(name, common)
    source = Path(tokenizer_source(path).path)
    has_tokenizer = any((source / one).is_file() for one in TOKENIZER_FILES)
    checkpoint = open_checkpoint(path, override)
    print(exporters[to](checkpoint, source if has_tokenizer else None, path_of(directory, "directory")))
    if to == "hf" and checkpoint.config.ropes[0].table_dtype == "bfloat16":
        note(_ROUNDED, common.quiet)
    return 0


def fill_options(_app: App, _commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """With --nanochat, fill in the base directory and the sampling defaults for options not given.

    Without it, ignore nanochat's options from the environment or a file; typed ones are an error.
    """
    by_name = {argument.field_info.name: argument for argument in arguments}
    switch, model = by_name.get("nanochat"), by_name.get("model_path")
    if switch is None or model is None:
        return
    if not (switch.tokens and switch.convert()):
        for name in (field.name for field in fields(NanochatOptions) if field.name != "nanochat"):
            by_name[name].tokens[:] = [token for token in by_name[name].tokens if token.source == "cli"]
        return
    if not model.tokens:
        fill(model, BASE, BUILT_IN)
    if by_name["server"].tokens:
        return  # refused by `chat`
    for name, value in NANOCHATS_OWN.items():
        if not by_name[name].tokens:
            fill(by_name[name], value, "nanochat's own default")


CHAT_COMMAND = Command(words="chat", target="nano_inference.cli.nanochat:chat", fill=fill_options)
"""Replaces the built-in `chat`, which has no --nanochat."""
EXPORT_COMMAND = Command(
    words="models export", target="nano_inference.cli.nanochat:models_export", arguments=" NAME DIRECTORY"
)
