"""`ServerConfig`: frozen and flat; each field has its command-line help text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal
from urllib.parse import urlsplit

from nano_inference.config import helped
from nano_inference.support.checks import SEEDS, Check, check_fields, check_text, from_known, integer, number
from nano_inference.text.templates import TEMPLATES
from nano_inference.types import LogprobsMode

GenerationConfig = Literal["auto", "none"]
Pooling = Literal["mean", "last"]
ReasoningFormat = Literal["auto", "none"]


class SettingError(ValueError):
    """An invalid value. `fields` are the field names in the text, which the command line shows as flags."""

    def __init__(self, text: str, *fields: str) -> None:
        super().__init__(text)
        self.fields = fields


_HOST = "127.0.0.1"
_NAME = re.compile(r"[\w.-]*")
_SECONDS, _PAUSE = number(0, 1e6, open_low=True), number(0, 1e6)
DEFAULT_SHARE = 0.75  # `client_share` with several clients: one client leaves a quarter of the capacity to others


def resolved(default: Any, with_rl: Any, text: str, check: Check | None = None) -> Any:
    """Return a field with another default with `enable_rl`: a trainer sends large batches."""
    text = f"{text} (default: {default}; {with_rl} with --enable-rl)"
    return field(default=None, metadata={"help": text, "check": check, "defaults": (default, with_rl)})


def texts(text: str, *, is_secret: bool = False) -> Any:
    """Return a field of texts, none by default; `is_secret` keeps them out of messages and logs."""
    return field(default=(), repr=not is_secret, metadata={"help": text})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Configuration of the server. Raises `ValueError` naming an invalid field."""

    host: str = helped(_HOST, "address to listen on; anything but loopback needs an API key, or --insecure")
    port: int = helped(8000, "port to listen on; 0 takes a free one", integer(0, 65535))
    uds: str | None = helped(
        None, "Unix socket to listen on in place of host and port; only its owner may connect", check_text
    )
    root_path: str = helped("", "path below which a proxy serves this server, such as /llm")
    served_model_name: tuple[str, ...] = texts("name of the model for clients; may be repeated for aliases")
    any_model: bool = helped(False, "answer requests for any model name (clients that hard-code gpt-…)")
    strict: bool = helped(False, "refuse fields that are not known instead of leaving them out")
    logprobs_mode: LogprobsMode = resolved("raw", "processed", "distribution of reported log-probabilities")
    generation_config: GenerationConfig = resolved(
        "auto",
        "none",
        "sampling of requests that name none: auto is the model's generation_config.json, none temperature 1 without "
        "truncation",
    )
    chat_template: str | None = helped(
        None,
        "chat template in place of the model's: its text in Jinja, or a format's name: chatml, command-r, llama3",
        check_text,
    )
    chat_template_file: str | None = helped(None, "file with a chat template in place of the model's", check_text)
    chat_template_kwargs: str | None = helped(
        None, "variables of the chat template, a JSON object, for requests that set no other value", check_text
    )
    prefill_assistant: bool = helped(
        False,
        "continue a last message of the assistant, as llama.cpp does, in chats that set neither continue_final_message "
        "nor add_generation_prompt",
    )
    reasoning_format: ReasoningFormat = resolved(
        "auto",
        "none",
        "what a chat's reply does with a model's reasoning: auto returns it apart from the content, none in it",
    )
    temp: float | None = helped(None, "temperature of requests that name none", number(0, 2))
    default_seed: int | None = helped(
        None, "seed of requests that name none, so that a repeated request gets the same answer", integer(*SEEDS)
    )
    pooling: Pooling = helped("mean", "pooling of embeddings in requests that name none: mean or last")
    n_predict: int | None = helped(
        None, "most tokens of an answer to requests that set no limit (default: to the end of the context)", integer(1)
    )
    enable_rl: bool = helped(False, "open the routes of RL trainers: pause, abort, weights, versions")
    enable_lora: bool = helped(
        False, "open the routes that load LoRA adapters; requests name an adapter in place of the model"
    )
    lora_modules: tuple[str, ...] = texts("adapter to load at the start, as NAME=PATH; may be repeated")

    api_key: tuple[str, ...] = texts(
        "key that clients must send; may be repeated (others can see it in ps)", is_secret=True
    )
    api_key_file: str | None = helped(None, "file with a key on each line, which only its owner may read")
    insecure: bool = helped(False, "listen beyond loopback without a key; allow keys of less than 8 characters")
    admin_key: tuple[str, ...] = texts(
        "key that these routes need, and that opens all others; may be repeated", is_secret=True
    )
    admin_key_file: str | None = helped(None, "file with an admin key on each line, which only its owner may read")
    weights_dir: str | None = helped(
        None, "directory below which a trainer may name weights or adapters to load", check_text
    )
    weight_timeout: float = helped(
        300.0, "seconds in which the weights of an update must have come", number(0, 86400, open_low=True)
    )
    allowed_host: tuple[str, ...] = texts("Host header to accept in addition to the address; may be repeated")
    cors_origin: tuple[str, ...] = texts(
        "web origin whose pages may call this server, or localhost for those of this machine; may be repeated"
    )
    share_prefix_cache: bool = helped(False, "let clients with different keys reuse each other's cached prefixes")

    max_queued_requests: int = resolved(256, 65536, "most samples that wait; more are refused with 503", integer(0))
    max_admitted_tokens: int = resolved(
        1 << 22, 1 << 30, "most prompt and answer tokens of admitted requests", integer(1)
    )
    client_share: float | None = helped(
        None,
        "part of all places (samples, tokens, connections) that one client may hold, of what others leave; 1: all "
        f"(default: {DEFAULT_SHARE}; 1 with a single key, and on loopback without keys)",
        number(0, 1, open_low=True),
    )
    trusted_proxy: tuple[str, ...] = texts(
        "address or range of a proxy whose X-Forwarded-For names the client; may be repeated"
    )
    max_n: int = resolved(16, 1024, "most samples of one prompt", integer(1, 65536))
    max_logprobs: int = resolved(20, 1000, "most alternatives of a token; -1 is the whole vocabulary", integer(-1))
    max_body_bytes: int = resolved(4 << 20, 64 << 20, "largest request body, in bytes or as 8MiB", integer(1024))
    max_stored_replies: int = helped(
        1024, "most replies of /v1/responses kept in memory for clients that refer to them; 0 keeps none", integer(0)
    )
    max_stored_bytes: int = helped(64 << 20, "most bytes of these replies, in bytes or as 64MiB", integer(0))
    max_connections: int = helped(
        1000, "most open connections; fewer when the process may open fewer files", integer(1)
    )

    max_tokens_per_batch: int | None = helped(
        None,
        "most tokens computed in one step (default: 256 on a CPU, where longer ones make all wait; else 2048)",
        integer(1),
    )
    request_timeout: float = resolved(
        600.0, 86400.0, "seconds a request may take; then it ends with what it has", _SECONDS
    )
    header_timeout: float = helped(
        20.0, "seconds in which a request's headers, and then its body, must arrive", _SECONDS
    )
    keep_alive_timeout: float = helped(30.0, "seconds a connection may be idle between requests", _SECONDS)
    write_timeout: float = helped(60.0, "seconds a client may leave what it is sent unread", _SECONDS)
    sse_keep_alive: float = helped(
        15.0, "seconds of silence after which a stream sends a comment; 0 sends none", _PAUSE
    )
    shutdown_timeout: float = helped(
        30.0, "seconds that requests have to end after SIGTERM; 0 aborts them at once", _PAUSE
    )
    step_timeout: float = helped(120.0, "seconds one step may take before the engine counts as stuck", _SECONDS)
    exit_on_failure: bool = helped(False, "end the process when the engine fails, instead of answering 503")

    replicas: int | None = helped(
        None,
        "engines that share the port, each in its own process, started by Ray: needs the extra ray",
        integer(1, 4096),
    )
    workers: tuple[str, ...] = texts(
        "URL of a running server to send requests to, or several with commas; no model is loaded; may be repeated"
    )

    further_model: tuple[str, ...] = texts(
        "model, in the form of --model or as NAME=PATH, that is loaded when a request names it; may be repeated"
    )
    models_memory: int | None = helped(
        None,
        "most memory of loaded models, in bytes or as 12GiB; the least recently used ones are unloaded (default: 80% "
        "of what is free at the start)",
        integer(1),
    )
    max_loaded_models: int | None = helped(
        None, "most models loaded at the same time (default: as many as the memory allows)", integer(1)
    )
    enable_per_request_metrics: bool = helped(
        False, "return the times of a request in its reply, as vLLM does: `metrics`"
    )
    enable_force_include_usage: bool = helped(
        False, "send the usage with each chunk of a stream, as vLLM does with `continuous_usage_stats`"
    )
    return_tokens_as_token_ids: bool = helped(
        False, "name tokens in log-probabilities token_id:N, for requests that do not set this field"
    )
    pages: bool = helped(True, "serve the chat page, the dashboard and the page about the API")
    template_dates: bool = helped(
        False, "set today's date for chat templates, as llama.cpp does: `date_string` and `datetime`"
    )

    log_requests: bool = helped(True, "JSON on stderr: a line for every finished request, and for every warning")

    def __post_init__(self) -> None:
        for name in ("host", "root_path"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name} must be a string, got {getattr(self, name)!r}")
        for one in fields(self):
            value = getattr(self, one.name)
            if value is None and "defaults" in one.metadata:
                object.__setattr__(self, one.name, one.metadata["defaults"][bool(self.enable_rl)])
            elif one.default == ():
                object.__setattr__(self, one.name, checked_texts(one.name, value))
        check_fields(self)
        object.__setattr__(self, "workers", worker_urls(self.workers))
        for is_wrong, text in self._rules():
            if is_wrong:
                raise ValueError(text)

    def _rules(self) -> Iterator[tuple[object, str]]:
        """Yield (whether fields contradict each other, the error's text)."""
        yield not self.host, "host must not be empty; 0.0.0.0 listens everywhere"
        yield self.uds is not None and self.host != _HOST, "uds takes the place of host: set one of them"
        root = self.root_path
        text = f"root_path must begin with a slash and not end with one, got {root!r}"
        yield root and (not root.startswith("/") or root.endswith("/")), text
        template, both = self.chat_template, self.chat_template is not None and self.chat_template_file is not None
        yield both, "chat_template and chat_template_file exclude each other: set one of them"
        text = (
            f"chat_template must be the text of a template, or one of {', '.join(TEMPLATES)}; {template!r} is neither"
        )
        # llama.cpp knows more by name.
        yield template is not None and template not in TEMPLATES and _NAME.fullmatch(template), text
        given = self.chat_template_kwargs
        text = f"chat_template_kwargs must be a JSON object, got {(given or '')[:80]!r}"
        yield given is not None and not _is_object(given), text
        text = "generation_config must be none with enable_rl: the model's own defaults would skew rollouts"
        yield self.enable_rl and self.generation_config != "none", text
        for name in ("weights_dir", "admin_key", "admin_key_file"):
            text = f"{name} is for a trainer: it needs enable_rl or enable_lora"
            yield getattr(self, name) and not self.takes_commands, text
        yield self.lora_modules and not self.enable_lora, "lora_modules needs enable_lora"
        for module in self.lora_modules:
            yield not all(module.partition("=")), f"lora_modules must be NAME=PATH, got {module[:200]!r}"
        both = self.replicas is not None and bool(self.workers)
        yield both, "replicas starts engines, workers names running ones: set one of them"
        text = "workers: routes for trainers need replicas of this server, or a RolloutPool"
        yield self.workers and self.takes_commands, text
        several = bool(self.further_model)
        for name in ("models_memory", "max_loaded_models"):
            text = f"{name} is for several models: it needs further_model"
            yield getattr(self, name) is not None and not several, text
        for name in ("chat_template", "chat_template_file", "chat_template_kwargs"):
            text = f"{name} belongs to one model: it cannot be set with further_model"
            yield several and getattr(self, name) is not None, text
        text = "further_model cannot be used with replicas or workers, which serve one model"
        yield several and (self.replicas is not None or self.workers), text
        yield several and self.takes_commands, "further_model: routes for trainers need a server of one model"

    @property
    def takes_commands(self) -> bool:
        """Whether some routes change what others get."""
        return self.enable_rl or self.enable_lora

    def to_dict(self) -> dict[str, Any]:
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ServerConfig:
        """Build from the form of `to_dict`. Raises `ValueError` naming an unknown field."""
        return from_known(cls, data)


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def worker_urls(texts: tuple[str, ...]) -> tuple[str, ...]:
    """Return the URLs in texts that list them with commas. Raises `ValueError` naming `workers`."""
    urls = tuple(url.strip().rstrip("/") for text in texts for url in text.split(","))
    for url in urls:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path or parts.query or parts.username:
            raise ValueError(f"workers must be URLs such as http://127.0.0.1:8001, without a path, got {url!r}")
    if len(set(urls)) < len(urls):
        raise ValueError("workers lists a URL twice")
    return urls


def checked_texts(name: str, values: object) -> tuple[str, ...]:
    """Return a list of non-empty texts as a tuple. Raises `ValueError` naming `name`."""
    if isinstance(values, str) or not isinstance(values, list | tuple) or not all(isinstance(v, str) for v in values):
        raise ValueError(f"{name} must be a list of texts, got {type(values).__name__}")
    if "" in values:
        raise ValueError(f"{name} must not hold an empty text")
    return tuple(values)
