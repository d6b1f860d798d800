"""llama.cpp's POST /completion and /completions, and GET /props.

Fields and reply as in its server's README (tools/server/README.md). Differences: `repeat_penalty` covers the whole
prompt and answer and the other penalties the whole answer, not the last 64 tokens; a token forbidden with `false` gets
a bias of -100.
"""

from __future__ import annotations

import math
import secrets
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import Field

import nano_inference
from nano_inference.server import schema
from nano_inference.server.config import ServerConfig
from nano_inference.server.detokenizer import DecodedDelta, LogprobEntry, token_bytes_of, token_text
from nano_inference.server.dialect import Describing, Dialect, Occupancy, Route
from nano_inference.server.errors import ApiError, refused, shortened, unsupported_field
from nano_inference.server.events import event
from nano_inference.server.generation import JSON, Generation
from nano_inference.server.model import ServedModel
from nano_inference.server.prompts import api_errors, check_text_length
from nano_inference.server.replies import Reply, version_facts
from nano_inference.server.schema import Body, CompletionBody
from nano_inference.server.timings import prefill_reports, timings_of
from nano_inference.server.transcript import Transcript
from nano_inference.server.translated import given_fields, translated
from nano_inference.text.dialogue import TemplateDialogue
from nano_inference.text.tokenizer import Tokenizer

_MOST_BIAS = 100.0  # the largest bias of OpenAI's API; its negative bans a token
_CLIENT_NAMES: Mapping[str, str] = {
    "max_tokens": "n_predict",
    "repetition_penalty": "repeat_penalty",
    "logprobs": "n_probs",
    "n": "n_cmpl",
}
"""Field of `CompletionBody` -> llama.cpp's field, where the names differ."""

Pieces = Annotated[list[schema.TokenId | str], Field(min_length=1, max_length=1 << 20, fail_fast=True)]  # of one prompt


class PromptText(Body):
    """llama.cpp's other form of a text prompt; the media that may go with it are not supported."""

    prompt_string: str


class LlamaBody(Body):
    """POST /completion."""

    prompt: (
        str
        | PromptText
        | schema.TokenIds
        | Pieces
        | Annotated[list[str | PromptText | schema.TokenIds | Pieces], Field(min_length=1, max_length=1024)]
    )
    """A text, a list of ids or a list of both; or a list of such prompts. A list of texts is several prompts."""

    model: Annotated[str, Field(max_length=512)] | None = None
    n_predict: Annotated[int, Field(ge=-2, le=schema.INT32)] | None = None
    """Negative: up to the end of the context. 0: prefill only."""
    max_tokens: Annotated[int, Field(ge=-2, le=schema.INT32)] | None = None
    """OpenAI's name of `n_predict`, which has precedence."""
    n_cmpl: schema.Samples | None = 1
    temperature: schema.Temperature | None = 0.8
    top_k: schema.CountOrOff | None = 40
    top_p: schema.PositiveShare | None = 0.95
    min_p: schema.Share | None = 0.05
    repeat_penalty: schema.Factor | None = 1.0
    repeat_last_n: schema.CountOrOff | None = None  # -1: all tokens; 0: no penalty. Other windows are not supported.
    presence_penalty: schema.Penalty | None = 0.0
    frequency_penalty: schema.Penalty | None = 0.0
    seed: schema.SeedOrRandom | None = -1
    stop: schema.Stops | None = None
    ignore_eos: bool | None = None
    logit_bias: (
        Literal[False]
        | Annotated[list[list[int | float | str | bool]], Field(max_length=schema.MAX_BIAS)]
        | Annotated[dict[str, float | bool], Field(max_length=schema.MAX_BIAS)]
        | None
    ) = None
    """[[id or text, bias], …] or {id or text: bias}; the bias false forbids the token."""
    n_probs: schema.Alternatives | None = 0
    grammar: str | None = None  # GBNF
    json_schema: dict[str, Any] | None = None
    cache_prompt: bool | None = True
    stream: bool | None = None
    return_tokens: bool | None = None
    timings_per_token: bool | None = None
    return_progress: bool | None = None
    post_sampling_probs: bool | None = None
    """Return the probabilities of tokens as they were sampled, after truncation and temperature."""
    response_fields: Annotated[list[Annotated[str, Field(max_length=256)]], Field(max_length=256)] | None = None
    """Paths of the reply's fields to send, such as `generation_settings/n_predict`; empty: all fields."""


# ---- body -> generation


def ask_llama(body: LlamaBody, model: ServedModel, config: ServerConfig, salt: str) -> Generation:
    """Return what a body of POST /completion asks for. Raises `ApiError` naming the invalid field."""
    if body.repeat_last_n is not None and body.repeat_last_n > 0:
        message = f"repeat_last_n must be -1 (all tokens) or 0 (no penalty), got {body.repeat_last_n}"
        raise unsupported_field("repeat_last_n", message)
    values = given_fields(body)
    fields: JSON = {name: value for name, value in values.items() if name in CompletionBody.model_fields}
    if body.temperature is None or "temperature" not in body.model_fields_set:
        fields["temperature"] = config.temp if config.temp is not None else fields["temperature"]
    if body.repeat_last_n == 0:
        fields |= {"presence_penalty": 0.0, "frequency_penalty": 0.0}
    else:
        fields["repetition_penalty"] = values["repeat_penalty"]
    if body.n_probs:
        fields["logprobs"] = body.n_probs
    limit = body.max_tokens if body.n_predict is None else body.n_predict
    seed = body.seed
    if seed in (None, -1, 2**32 - 1):  # None is the server's default; a body that asks for a random seed gets one
        seed = secrets.randbits(32) if "seed" in body.model_fields_set and seed is not None else None
    prompts = _prompts(body.prompt, model)
    bias = _bias(body.logit_bias, model.tokenizer)
    if body.ignore_eos:  # llama.cpp then does not sample the end tokens at all
        bias |= dict.fromkeys(map(str, sorted(model.limits.eos_token_ids)), -_MOST_BIAS)
    fields |= {
        "prompt": prompts,
        "n": body.n_cmpl,
        "max_tokens": None if limit is None or limit < 0 else limit,  # None: up to the end of the context
        "n_predict": None,
        "seed": seed,
        "logit_bias": bias,
        "return_token_ids": True,
    }
    if body.post_sampling_probs:
        config = replace(config, logprobs_mode="processed")
    generation = translated(fields, CompletionBody, _CLIENT_NAMES, model, config, salt)
    requests = generation.requests
    if body.cache_prompt is False:  # each prompt has a namespace of its own, in which nothing is cached
        requests = tuple(replace(one, salt=f"{one.salt}#{uuid.uuid4().hex}") for one in requests)
    name = f"cmpl-{uuid.uuid4().hex}"
    return replace(generation, requests=requests, id=name, names=frozenset({name}), options=body)


def _prompts(given: Any, model: ServedModel) -> list[str] | list[list[int]]:
    """Return all prompts as texts, or all as lists of ids. Raises `ApiError` for media and for a text too long."""
    several = given if isinstance(given, list) else [given]
    for index, one in enumerate(several):
        media = (one.model_extra or {}).get("multimodal_data") if isinstance(one, PromptText) else None
        if media not in (None, "", []):
            where = f"prompt.{index}" if isinstance(given, list) else "prompt"
            raise unsupported_field(f"{where}.multimodal_data")
    several = [one.prompt_string if isinstance(one, PromptText) else one for one in several]
    if all(isinstance(one, str) for one in several):
        return several
    prompts: list[list[int]] = []
    for pieces in [several] if any(isinstance(one, int) for one in several) else several:
        pieces = [pieces] if isinstance(pieces, str) else pieces
        check_text_length((one for one in pieces if isinstance(one, str)), "prompt", model)
        with api_errors("prompt"):  # special tokens are added only to a text in first position
            rows = [
                [one] if isinstance(one, int) else model.tokenizer.encode(one, add_special=index == 0)
                for index, one in enumerate(pieces)
            ]
        prompts.append([token for row in rows for token in row])
    return prompts


def _bias(bias: Any, tokenizer: Tokenizer) -> dict[str, float]:
    """Return the biases as {token id: bias}. Raises `ApiError` for a malformed entry.

    Texts may share tokens, whose biases are added, at most to 100.
    """
    if not bias:
        return {}
    pairs: Any = bias
    if isinstance(bias, dict):
        pairs = [(int(key) if key.isdecimal() else key, value) for key, value in bias.items()]
    sums: dict[str, float] = {}
    for index, pair in enumerate(pairs):
        where = f"logit_bias.{index}"
        if len(pair) != 2 or isinstance(pair[0], bool | float) or isinstance(pair[1], str) or pair[1] is True:
            raise refused(where, "must be [token id or text, number or false]")
        key, value = pair
        if abs(value) > _MOST_BIAS:
            raise refused(where, f"the bias must be from -100 to 100, got {value}")
        tokens = [key] if isinstance(key, int) else tokenizer.encode(key, add_special=False)
        for token in tokens:
            sums[str(token)] = sums.get(str(token), 0.0) + (-_MOST_BIAS if value is False else float(value))
    return {token: max(-_MOST_BIAS, min(_MOST_BIAS, bias)) for token, bias in sums.items()}


# ---- reply


@dataclass
class LlamaReply(Reply[LlamaBody]):
    """The reply to /completion: an object for one answer, a list for several."""

    _with_newline: set[int] = field(init=False, default_factory=set)
    """Samples of which a stream has sent a line's end."""

    def whole(self) -> Any:
        answers = [self._answer(transcript) for transcript in self.transcripts]
        return answers if len(answers) > 1 else answers[0]

    def part(self, transcript: Transcript, decoded: DecodedDelta) -> bytes:
        if "\n" in decoded.text:
            self._with_newline.add(transcript.index)
        nothing = DecodedDelta("", (), (), None, None)
        data = b"".join(
            event(self._chunk(transcript, nothing) | {"prompt_progress": report})
            for report in prefill_reports(self.generation, transcript, decoded)
        )
        data += event(self._chunk(transcript, decoded)) if decoded.text or decoded.token_ids else b""
        return data if decoded.finish_reason is None else data + event(self._answer(transcript))

    def end(self) -> bytes:
        """Return nothing: each sample has its own last event."""
        return b""

    @staticmethod
    def broken(error: ApiError, first: bytes = b"", number: int = 0) -> bytes:
        return event(error_body(error))

    def _chunk(self, transcript: Transcript, decoded: DecodedDelta) -> JSON:
        chunk: JSON = {
            "index": transcript.index,
            "content": decoded.text,
            "tokens": list(decoded.token_ids),
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": len(transcript.token_ids),
            "tokens_evaluated": len(self.generation.requests[transcript.prompt_index].prompt),
        }
        if self.generation.logprobs is not None:
            chunk["completion_probabilities"] = self._probabilities(decoded.entries)
        if self.options.timings_per_token:
            chunk["timings"] = timings_of(self.generation, transcript)
        if self.generation.versions and decoded.delta is not None:
            chunk["mask"] = list(decoded.delta.mask)
        return chunk

    def _answer(self, transcript: Transcript) -> JSON:
        generation, is_sent, num_tokens = self.generation, self.generation.stream, len(transcript.token_ids)
        request = generation.requests[transcript.prompt_index]
        limit = request.params.max_tokens
        is_short = limit is None or num_tokens < limit  # the end of the context ended the answer
        word = transcript.stop_reason if isinstance(transcript.stop_reason, str) else None
        kinds = {"stop": "eos" if word is None else "word", "length": "limit"}
        known = [token for token in request.prompt if token < self.generation.tokenizer.vocab_size]
        answer: JSON = {
            "index": transcript.index,
            "content": "" if is_sent else transcript.text,
            "tokens": list(transcript.token_ids) if self.options.return_tokens and not is_sent else [],
            "id_slot": -1,
            "stop": True,
            "model": generation.model,
            "tokens_predicted": num_tokens,
            "tokens_evaluated": len(request.prompt),
            "generation_settings": self._settings(),
            "prompt": self.generation.tokenizer.decode(known, skip_special=False),
            "has_new_line": transcript.index in self._with_newline if is_sent else "\n" in transcript.text,
            "truncated": transcript.finish_reason == "length" and is_short,
            "stop_type": kinds.get(transcript.finish_reason or "", "none"),
            "stopping_word": word if word is not None and transcript.finish_reason == "stop" else "",
            "tokens_cached": 0 if transcript.sample is None else transcript.sample.num_cached_tokens,
            "timings": timings_of(generation, transcript),
        }
        if generation.logprobs is not None and not is_sent:
            answer["completion_probabilities"] = self._probabilities(transcript.entries)
        if generation.versions and self.options.return_tokens and not is_sent:
            answer["mask"] = list(transcript.mask)
        if generation.versions:
            answer |= version_facts(transcript, generation)
        return selected(answer, self.options.response_fields or ())

    def _settings(self) -> JSON:
        params, generation = self.generation.requests[0].params, self.generation
        return {
            "n_predict": -1 if params.max_tokens is None else params.max_tokens,
            "seed": -1 if params.seed is None else params.seed,
            "temperature": params.temperature,
            "top_k": params.top_k,
            "top_p": params.top_p,
            "min_p": params.min_p,
            "repeat_last_n": -1,
            "repeat_penalty": params.repetition_penalty,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "stop": list(generation.stops),
            "ignore_eos": params.ignore_eos,
            "logit_bias": [
                {"token": token, "bias": None if bias <= -_MOST_BIAS else bias}
                for token, bias in sorted(params.logit_bias.items())
            ],
            "n_probs": generation.logprobs or 0,
            "grammar": self.options.grammar or "",
            "samplers": ["penalties", "temperature", "top_k", "top_p", "min_p"],  # in the order of their application
            "stream": generation.stream,
            "timings_per_token": bool(self.options.timings_per_token),
        }

    def _probabilities(self, entries: Sequence[LogprobEntry]) -> list[JSON]:
        """Return tokens and alternatives with log-probabilities, or with `post_sampling_probs` probabilities."""
        as_probs, count = bool(self.options.post_sampling_probs), self.generation.logprobs
        is_greedy = self.generation.requests[0].params.temperature == 0  # log-probabilities are those of the logits

        def item(token: int, logprob: float | None, drawn: int) -> JSON:
            data = list(token_bytes_of(token, self.generation.tokenizer))
            entry: JSON = {"id": token, "token": token_text(token, self.generation.tokenizer), "bytes": data}
            if as_probs:
                return entry | {"prob": float(token == drawn) if is_greedy else math.exp(logprob or 0.0)}
            return entry | {"logprob": logprob}

        return [
            {
                **item(entry.token, entry.logprob, entry.token),
                "top_probs" if as_probs else "top_logprobs": [
                    item(one.token, one.logprob, entry.token) for one in (entry.top or ())[:count]
                ],
            }
            for entry in entries
        ]


def selected(answer: JSON, paths: Sequence[str]) -> JSON:
    """Return the answer's values at these `a/b` paths, by path; the whole answer if `paths` is empty."""
    if not paths:
        return answer
    found: JSON = {}
    for path in paths:
        value: Any = answer
        for name in path.split("/"):
            value = value.get(name) if isinstance(value, dict) else None
        if value is not None:
            found[path] = value
    return found


def error_body(error: ApiError) -> JSON:
    """Return llama.cpp's error object: `code` is the HTTP status, and a prompt that is too long has its own type."""
    is_long = error.code == "context_length_exceeded"
    kind = "exceed_context_size_error" if is_long else error.type
    return {"error": {"code": error.status, "message": shortened(error.message), "type": kind, **error.extra}}


def props(model: ServedModel, occupancy: Occupancy) -> JSON:
    """Return the reply of GET /props; `model_path` is the file's name, without its directory."""
    dialogue, named = model.dialogue, model.tokenizer.named
    defaults = given_fields(LlamaBody(prompt=""))
    names = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "presence_penalty", "frequency_penalty")
    params = {"n_predict": -1, **{name: defaults[name] for name in (*names, "n_probs")}}
    params["seed"] = model.generation.get("seed", -1)
    return {
        "default_generation_settings": {"n_ctx": model.limits.max_model_len, "params": params},
        "total_slots": occupancy.max_running,
        "model_alias": model.name,
        "model_path": model.file_name or model.name,
        "modalities": {"vision": False, "audio": False},
        "chat_template": dialogue.template.source if isinstance(dialogue, TemplateDialogue) else "",
        "bos_token": named.get("bos_token", ""),
        "eos_token": named.get("eos_token", ""),
        "build_info": f"nano-inference {nano_inference.__version__}",
    }


_COMPLETE = "Complete a text or token ids; the interface of llama.cpp's server."
_DESCRIBE = "Describe the model and the defaults of /completion; the interface of llama.cpp's server."
DIALECT = Dialect(
    generating=tuple(
        Route(path=path, body=LlamaBody, ask=ask_llama, reply=LlamaReply, summary=_COMPLETE)
        for path in ("/completion", "/completions")
    ),
    describing=(Describing(path="/props", describe=props, summary=_DESCRIBE),),
    error_body=error_body,
)
