"""Options that several commands share; flags and help texts come from the fields of the configurations. No torch."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter

from nano_inference.cli.arguments import Typed
from nano_inference.config import EngineConfig, helped
from nano_inference.server.config import ServerConfig
from nano_inference.support.files import path_of
from nano_inference.types import BadRequest, SamplingParams

if TYPE_CHECKING:
    from cyclopts.completion import CompletionContext  # slow to import

_NAMING = ("model_path", "model", "name")  # fields that name a model; all fields of a configuration share one completer


def cached_names(context: CompletionContext) -> list[tuple[str, str]]:
    """Return the models on this machine with their sources; for an option that names no model, its choices."""
    if context.argument.field_info.name not in _NAMING:
        return [(choice, "") for choice in context.argument.get_choices(force=True) or ()]
    from nano_inference.loading.catalog import default_cache, list_models

    cache = context.get("--cache")
    place = path_of(cache.raw, "--cache") if cache is not None and cache.raw else default_cache(os.environ)
    return [(entry.name, entry.source) for entry in list_models(place)]


def removable_names(context: CompletionContext) -> list[tuple[str, str]]:
    """Return the models that can be deleted."""
    return [(name, source) for name, source in cached_names(context) if source != "package"]


def known_names(_context: CompletionContext) -> list[tuple[str, str]]:
    """Return the models that can be fetched by a built-in name."""
    from nano_inference.loading.catalog import WHEELS, installed_builtins

    wheels = [(name, wheel.requirement) for wheel in WHEELS for name in (wheel.name, *wheel.aliases[:1])]
    return wheels + [(one.name, "comes with the package") for one in installed_builtins()]


_FLAG_OF = {"model_path": "model", "overrides": "override"}
_SHORT = {"prompt": "-p", "model_path": "-m", "temperature": "-t", "top_k": "-k", "dtype": "-d"}
_BOTH_HAVE = ("seed", "logprobs_mode")  # fields of `EngineConfig` and `SamplingParams`: the flag sets the latter
WITHOUT_FLAG = ("logit_bias", "allowed_token_ids", "logprob_token_ids")  # sampling fields without a flag

_CHAT_GROUP, _SERVER_GROUP = Group("Chat", sort_key=1), Group("Server", sort_key=1)
_ENGINE_GROUP = Group("Engine", sort_key=2)
_SAMPLING_GROUP = Group("Sampling", sort_key=3, help="Defaults are the model's (generation_config.json), else these.")
_COMMON_GROUP = Group("Common", sort_key=5)

CONFIG_HELP = "TOML file with options; takes precedence over ~/.config/nano-inference/config.toml"
SYSTEM_HELP = "system message; by default the chat template's"
PRINT_HELP = "print every option's value as such a file, and exit"


def flags(group: Group, skip: Iterable[str] = (), short: Mapping[str, str] = _SHORT) -> Parameter:
    """Return the cyclopts parameter that turns each field of a dataclass, except those in `skip`, into a flag.

    `group` is the heading in --help; `short` maps fields to short flags.
    """
    skipped = "|".join(skip)
    return Parameter(
        name="*",
        group=group,
        required=False,
        negative_iterable="",
        name_transform=lambda name: _FLAG_OF.get(name, name).replace("_", "-"),
        completer=cached_names if group is _ENGINE_GROUP else None,
        short_alias=lambda info, _used: short.get(info.name),
        parse=re.compile(rf"^(?!(?:{skipped})$)") if skipped else None,
    )


def help_of(cls: type[Any], name: str) -> str:
    """Return the help text of a field."""
    return next(str(f.metadata["help"]) for f in fields(cls) if f.name == name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Common:
    """Options of every command that opens a model."""

    cache: Path | None = helped(None, "directory of fetched models")
    quiet: bool = helped(False, "no progress bars and no statistics on stderr")
    config: Path | None = helped(None, CONFIG_HELP)
    print_config: bool = helped(False, PRINT_HELP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Options of commands that do not open a model."""

    config: Path | None = helped(None, CONFIG_HELP)
    print_config: bool = helped(False, PRINT_HELP)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """Options of `chat` alone."""

    system: str | None = helped(None, SYSTEM_HELP)
    prompt: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = helped(None, "answer this message and exit")
    server: str | None = helped(
        None, "URL of a running OpenAI-compatible server, with or without /v1, that answers; no model is loaded"
    )
    api_key: str | None = helped(None, "the server's API key; in the environment it is hidden from `ps`")
    plain: bool = helped(False, "do not render the Markdown of answers")
    has_bare_words: bool = False  # True if quit, exit and clear need no slash; no flag

    def __post_init__(self) -> None:
        if self.server is not None and not self.server.strip():
            raise BadRequest("--server", "must be a URL, got nothing")


EngineFlags = Annotated[EngineConfig, flags(_ENGINE_GROUP, _BOTH_HAVE)]
ServedEngineFlags = Annotated[EngineConfig, flags(_ENGINE_GROUP, ("logprobs_mode", "max_tokens_per_batch"))]
ServerFlags = Annotated[ServerConfig, flags(_SERVER_GROUP)]
SamplingFlags = Annotated[SamplingParams, flags(_SAMPLING_GROUP, WITHOUT_FLAG)]
ChatFlags = Annotated[ChatOptions, flags(_CHAT_GROUP, ("has_bare_words",))]
CommonFlags = Annotated[Common, flags(_COMMON_GROUP)]
SettingsFlags = Annotated[Settings, flags(_COMMON_GROUP)]
TypedFields = Annotated[Typed, Parameter(parse=False)]  # not a flag: `app.run` passes the options that the user gave
ModelFlag = Annotated[
    str, Parameter(name=("--model", "-m"), completer=cached_names, help=help_of(EngineConfig, "model_path"))
]
OverrideFlag = Annotated[
    tuple[str, ...], Parameter(name="--override", negative_iterable="", help=help_of(EngineConfig, "overrides"))
]
JsonFlag = Annotated[bool, Parameter(name="--json", negative="", help="print JSON")]

PLAIN = SamplingParams()
COMMON = Common()
SETTINGS = Settings()
CHAT = ChatOptions()
SERVER = ServerConfig()
