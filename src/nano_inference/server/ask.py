"""`ask` of completions and chats: turns a body into a `Generation`. Pure.

Other dialects translate their bodies into the fields of these two (`server/translated.py`).

A chat's reply has the model's reasoning apart from its content in one way for all dialects: the text is split at the
marks `<think>` and `</think>` (`text.reasoning`), and each dialect returns reasoning in its own form. Operators choose
with `--reasoning-format`, clients with llama.cpp's `reasoning_format`, SGLang's `separate_reasoning` and vLLM's
`include_reasoning`.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from nano_inference.core.admission import checked
from nano_inference.server.config import ServerConfig
from nano_inference.server.detokenizer import prefix_text, visible_bytes
from nano_inference.server.errors import ApiError, refused
from nano_inference.server.generation import Generation, ReasoningStart
from nano_inference.server.model import ServedModel
from nano_inference.server.prompts import (
    Prompt,
    api_errors,
    chat_prompt,
    check_known,
    completion_prompts,
    fit_to_context,
    require_dialogue,
    to_api_error,
    with_prefill,
)
from nano_inference.server.schema import ChatBody, CompletionBody
from nano_inference.server.structured import FIELDS, Structure, structure_of
from nano_inference.server.tools import ToolUse, requested_tools
from nano_inference.text.dialogue import shown
from nano_inference.text.kinds import Tool
from nano_inference.text.reasoning import CLOSE_MARK, OPEN_MARK
from nano_inference.text.stop_regex import stop_regex_matcher
from nano_inference.text.stops import bad_words_matcher, both, stop_matcher
from nano_inference.text.tokenizer import Tokenizer
from nano_inference.text.tool_format import calls_grammar, calls_in_text_grammar, resume_program, special_tokens
from nano_inference.types import (
    FROM_THE_PROMPT,
    BadRequest,
    Beginning,
    EngineRequest,
    MatcherFactory,
    SamplingParams,
    TokenProgram,
)

_PROMPT_END = 16  # tokens of a prompt that are searched for the mark that opens reasoning
_DEFAULT_COMPLETION_TOKENS = 16
_SAMPLING_FIELDS = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty", "seed", "min_tokens", "ignore_eos", "stop_token_ids"),
    *("logit_bias", "allowed_token_ids"),
)


def ask_completion(body: CompletionBody, model: ServedModel, config: ServerConfig, salt: str) -> Generation:
    """Return what a body of POST /v1/completions asks for. Raises `ApiError` naming the invalid field."""
    _check(body, model, config)
    if body.best_of not in (None, 0, body.n or 1):
        raise ApiError(400, "best_of is not supported; use n, which returns all samples", param="best_of")
    default = _DEFAULT_COMPLETION_TOKENS if config.n_predict is None else config.n_predict
    max_tokens = _limit(body, default if body.max_tokens is None else body.max_tokens)
    prompts = completion_prompts(body, model, max_tokens)
    structure = structure_of({name: getattr(body, name) for name in FIELDS})
    tool = _calculator(bool(body.calculator), model, has_others=structure is not None)
    generation = _reply_options(body, config, model, [prompt.echo for prompt in prompts], tool)
    return _with_requests(generation, body, model, config, prompts, max_tokens, structure, salt, tool)


def ask_chat(body: ChatBody, model: ServedModel, config: ServerConfig, salt: str) -> Generation:
    """Return what a body of POST /v1/chat/completions asks for. Raises `ApiError` naming the invalid field."""
    body = with_prefill(body, model)
    _check(body, model, config)
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    if body.add_special_tokens:
        text = "add_special_tokens must be false in a chat: the template adds them"
        raise ApiError(400, text, param="add_special_tokens")
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    max_tokens = _limit(body, config.n_predict if max_tokens is None else max_tokens)
    if max_tokens == 0:
        field = "max_tokens" if body.n_predict is None else "n_predict"
        raise ApiError(400, f"{field} must be at least 1 in a chat", param=field)

    # The messages as tokens, with the functions and the structure of the answer.
    use = requested_tools(body, require_dialogue(model).tool_template)
    prompt = rendered = chat_prompt(body, model, max_tokens, use)
    structure = structure_of({name: getattr(body, name) for name in FIELDS})
    has_others = structure is not None or (use is not None and bool(use.functions))
    is_wanted = bool(body.calculator or (use and use.calculator))
    if body.calculator is None and model.calculates and not has_others:
        is_wanted = not config.enable_rl  # without its tool the model answers that there was no result
    tool = _calculator(is_wanted, model, has_others=has_others)
    generation = _reply_options(body, config, model, [prompt.echo], tool)
    program: TokenProgram | None = tool
    if body.answer_token_ids:
        prompt, generation, program = _prefilled(body, model, generation, prompt, max_tokens, has_others=has_others)

    # What the text of the answer is split into: reasoning, content, calls.
    whole = structure
    if use is not None and use.parses:
        special = special_tokens(model.tokenizer)
        markers = frozenset(special[mark] for mark in (use.format.begin, use.format.end) if mark in special)
        generation = replace(generation, functions=use, markers=markers)
        is_free = structure is None and not use.must_call
        structure = _structure(structure, use, special, "functions" if body.functions else "tools")
        whole = None if is_free else structure
    generation = _with_reasoning(generation, body, config, rendered.ids, rendered.echo, whole)
    beginning = Beginning(min(len(generation.prefix_ids), len(prompt.ids)), body.sample_index or 0)
    return _with_requests(generation, body, model, config, [prompt], max_tokens, structure, salt, program, beginning)


def _check(body: CompletionBody | ChatBody, model: ServedModel, config: ServerConfig) -> None:
    """Raise `ApiError` for counts above the limits and for what cannot be combined, before tokenizing."""
    if (body.n or 1) > config.max_n:
        raise ApiError(400, f"n must be at most {config.max_n}, got {body.n}", param="n")
    top = ("top_logprobs", body.top_logprobs) if isinstance(body, ChatBody) else ("logprobs", body.logprobs)
    for name, value in (top, ("prompt_logprobs", body.prompt_logprobs)):
        if value is not None and 0 <= config.max_logprobs < (_counted(value, model) or 0):
            hint = ", which needs --max-logprobs -1" if value < 0 else ""
            raise ApiError(400, f"{name} must be at most {config.max_logprobs}, got {value}{hint}", param=name)
    if body.prompt_logprobs is not None and body.stream:
        raise ApiError(400, "prompt_logprobs needs stream=false", param="prompt_logprobs")
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream=true", param="stream_options")
    model.name_for(body.model)
    if body.lineage not in (None, model.limits.lineage):  # another engine counted the versions of its tokens
        raise refused(
            "lineage",
            f"the tokens are of {body.lineage!r}, this server's lineage is {model.limits.lineage!r}, and their weight "
            "versions are unrelated; use the server that generated them, or set one --lineage for the pool",
        )


def _counted(count: int | None, model: ServedModel) -> int | None:
    """Return a number of alternatives, of which -1 is the whole vocabulary."""
    return model.limits.vocab_size if count == -1 else count


def _limit(body: CompletionBody | ChatBody, max_tokens: int | None) -> int | None:
    """Return the most tokens of an answer, None for the whole context: `n_predict`, or else `max_tokens`."""
    if body.n_predict is None:
        return max_tokens
    return None if body.n_predict < 0 else body.n_predict


def _calculator(is_wanted: bool, model: ServedModel, *, has_others: bool) -> Tool | None:
    """Return the model's calculator if wanted. Raises `ApiError` if the model has none, or with `has_others`.

    `has_others`: the request has functions or a structure, whose grammar does not allow the calculator's tokens.
    """
    if not is_wanted:
        return None
    if has_others:
        raise ApiError(400, "calculator cannot be combined with functions or a structure", param="calculator")
    tool = None if model.dialogue is None else model.dialogue.tool
    if tool is None:
        raise refused("calculator", "this model was not trained to use one")
    return tool


def _reply_options(
    body: CompletionBody | ChatBody, config: ServerConfig, model: ServedModel, echo: Sequence[str], tool: Tool | None
) -> Generation:
    """Return what the reply contains. Raises `ApiError` for named tokens without log-probabilities."""
    is_chat = isinstance(body, ChatBody)
    logprobs = body.logprobs
    if isinstance(body, ChatBody):
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
    echo_logprobs = not is_chat and bool(body.echo) and logprobs is not None
    named, as_ids = body.logprob_token_ids or None, body.return_tokens_as_token_ids
    if named and (logprobs is None or echo_logprobs):
        text = "cannot be combined with echo" if echo_logprobs else "needs logprobs"
        raise ApiError(400, f"logprob_token_ids {text}", param="logprob_token_ids")
    continues = isinstance(body, ChatBody) and body.continue_final_message
    forces_usage, options = config.enable_force_include_usage and bool(body.stream), body.stream_options
    includes_usage = bool(options and options.include_usage)
    return Generation(
        requests=(),
        num_samples=body.n or 1,
        num_tokens=0,
        kind="chat" if is_chat else "completion",
        id=f"{'chatcmpl' if is_chat else 'cmpl'}-{body.request_id or uuid.uuid4().hex}",
        model=model.name_for(body.model),
        tokenizer=model.tokenizer,
        fingerprint=model.fingerprint,
        stream=bool(body.stream),
        include_usage=forces_usage or includes_usage,
        continuous_usage=forces_usage or bool(includes_usage and options and options.continuous_usage_stats),
        metrics=config.enable_per_request_metrics,
        timings=bool(body.timings_per_token),
        progress=bool(body.return_progress and body.stream),
        stops=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        include_stop=bool(body.include_stop_str_in_output),
        skip_special=body.skip_special_tokens is not False,
        drop_space=is_chat and model.tokenizer.drops_space and not continues,
        echo=tuple(echo) if body.echo else (),
        tool=tool,
        token_ids=bool(body.return_token_ids),
        versions=config.enable_rl,
        tokens_as_ids=config.return_tokens_as_token_ids if as_ids is None else as_ids,
        logprobs=_counted(logprobs, model) if named is None else len(named),
        named=tuple(named or ()),
        prompt_logprobs=_counted(body.prompt_logprobs, model),
        echo_logprobs=echo_logprobs,
    )


def _prefilled(
    body: ChatBody,
    model: ServedModel,
    generation: Generation,
    prompt: Prompt,
    max_tokens: int | None,
    *,
    has_others: bool,
) -> tuple[Prompt, Generation, TokenProgram | None]:
    """Return prompt, options and program of an answer that starts with `answer_token_ids`. Raises `ApiError`."""
    field = "answer_token_ids"
    continues = body.continue_final_message or body.add_generation_prompt is False
    if has_others or continues:
        other = "continue_final_message or without a generation prompt" if continues else "functions or a structure"
        raise ApiError(400, f"{field} cannot be combined with {other}", param=field)
    ids, program = tuple(body.answer_token_ids or ()), None
    if len(ids) >= model.limits.max_model_len:  # checked first: the rest takes time for each token
        text = f"{field}: {len(ids)} tokens leave no room in the context of {model.limits.max_model_len}"
        raise ApiError(400, text, param=field, code="context_length_exceeded")
    check_known(ids, model, field)
    if generation.tool is not None:
        with api_errors(field):
            program, missing = resume_program(generation.tool, ids)
        ids += missing
    data = shown(model.tokenizer, generation.tool, ids, skip_special=generation.skip_special)
    generation = replace(generation, prefix_bytes=data, prefix_ids=ids)
    text = prefix_text(generation)
    prompt = Prompt(fit_to_context([*prompt.ids, *ids], body, model, max_tokens), text)
    return prompt, replace(generation, echo=(text,) if body.echo else ()), program


def _structure(asked: Structure | None, use: ToolUse, special: Mapping[str, int], field: str) -> Structure | None:
    """Return the structure of an answer with tools: the requested one, tool calls, or either. Raises `ApiError`.

    `field` is the name of the tools in the body.
    """
    if asked is None and not use.must_call:
        if not use.strict:
            return None
        with api_errors(field):  # free text, in which calls of strict functions follow their schemas
            return Structure(field, calls_in_text_grammar(use.functions, use.format, use.strict, special=special))
    answer: Mapping[str, Any] | None = None
    if asked is not None and not use.must_call:  # an answer that must be a call has no content for the structure
        if asked.grammar.kind not in ("json_schema", "json_object"):
            raise refused(asked.field, "with tool_choice auto only a JSON structure is supported")
        if use.format.is_whole:
            text = "with tool_choice auto this model's calls cannot be distinguished from a JSON answer"
            raise refused(asked.field, text)
        schema = json.loads(asked.grammar.text) if asked.grammar.kind == "json_schema" else {"type": "object"}
        answer = schema if isinstance(schema, dict) else {}
        field = asked.field
    with api_errors(field):
        grammar = calls_grammar(
            use.functions, use.format, name=use.name, parallel=use.parallel, special=special, answer=answer
        )
    return Structure(field, grammar)


def _with_reasoning(
    generation: Generation,
    body: ChatBody,
    config: ServerConfig,
    prompt: Sequence[int],
    last_text: str,
    structure: Structure | None,
) -> Generation:
    """Return the generation with reasoning apart, unless server or client want it in the text.

    `prompt` are the rendered messages, `last_text` is the text of the last one. A `structure` of the whole answer
    begins with its first token: there is no reasoning before it unless it has the closing mark.
    """
    is_off = body.separate_reasoning is False or body.reasoning_format == "none"
    is_on = bool(body.separate_reasoning or body.reasoning_format) or config.reasoning_format == "auto"
    if generation.tool is not None or is_off or not is_on:
        return generation
    tokenizer = generation.tokenizer
    can_reason = structure is None or CLOSE_MARK in structure.grammar.text
    is_inside = can_reason and _opens_reasoning(prompt, tokenizer)
    marks = {token for mark in (OPEN_MARK, CLOSE_MARK) for token in _special(mark, tokenizer)}
    prefix = last_text if body.continue_final_message else ""
    if generation.prefix_ids:
        data = [visible_bytes(token, tokenizer, token not in marks) for token in generation.prefix_ids]
        prefix = b"".join(data).decode("utf-8", "ignore")
    start = ReasoningStart(is_inside, prefix, is_hidden=body.include_reasoning is False)
    return replace(generation, reasoning=start, markers=generation.markers | marks)


def _special(mark: str, tokenizer: Tokenizer) -> Sequence[int]:
    ids = tokenizer.encode(mark, add_special=False, parse_special=True)
    return ids if len(ids) == 1 and ids[0] in tokenizer.special_ids else ()


def _opens_reasoning(prompt: Sequence[int], tokenizer: Tokenizer) -> bool:
    """Return True if a prompt ends with the mark that opens reasoning."""
    end = [token for token in prompt[-_PROMPT_END:] if token < tokenizer.vocab_size]
    return tokenizer.decode(end, skip_special=False).rstrip().endswith(OPEN_MARK)


def _sampling_params(
    body: CompletionBody | ChatBody,
    model: ServedModel,
    config: ServerConfig,
    generation: Generation,
    max_tokens: int | None,
) -> SamplingParams:
    """Return the sampling parameters: the body's, else those of the model's files, else the engine's defaults."""
    given = {name: value for name in _SAMPLING_FIELDS if (value := getattr(body, name)) is not None}
    scored = (generation.logprobs if generation.echo_logprobs else None, generation.prompt_logprobs)
    try:
        return SamplingParams(
            **{**model.generation, **given},
            max_tokens=max_tokens,
            logprobs=0 if generation.named else generation.logprobs,
            logprob_token_ids=generation.named,
            prompt_logprobs=max((count for count in scored if count is not None), default=None),
            logprobs_mode=config.logprobs_mode,
            raw_logprobs=bool(body.return_raw_logprobs),
            sampling_mask=bool(body.return_sampling_mask),
        )
    except ValueError as error:
        raise to_api_error(error) from None


def _with_requests(
    generation: Generation,
    body: CompletionBody | ChatBody,
    model: ServedModel,
    config: ServerConfig,
    prompts: Sequence[Prompt],
    max_tokens: int | None,
    structure: Structure | None,
    salt: str,
    program: TokenProgram | None,
    beginning: Beginning = FROM_THE_PROMPT,
) -> Generation:
    """Return the generation with one request per prompt, checked against the engine's limits. Raises `ApiError`."""
    params = _sampling_params(body, model, config, generation, max_tokens)
    with api_errors():
        matcher = _matcher(body, model, generation)
    requests = tuple(
        EngineRequest(
            prompt=tuple(prompt.ids),
            params=params,
            num_samples=generation.num_samples,
            salt=salt,
            make_matcher=matcher,
            program=program,
            adapter=model.adapter_for(body.model),
            beginning=beginning,
            is_streamed=generation.stream,
            reports_prefill=generation.progress or (generation.echo_logprobs and generation.stream),
        )
        for prompt in prompts
    )
    try:
        rooms = [checked(request, model.limits)[1] for request in requests]  # tokens that a sample may have
    except BadRequest as error:
        found = to_api_error(error)
        if "whole KV cache" in found.message:
            raise refused("max_tokens", found.message) from None
        is_chat = isinstance(body, ChatBody)  # which has no `prompt`
        param = "messages" if is_chat and found.param == "prompt" else found.param
        raise ApiError(400, found.message, param=param) from None
    return replace(
        generation,
        requests=requests,
        structures=() if structure is None else (structure,) * len(requests),
        num_tokens=sum(len(one.prompt) + one.num_samples * room for one, room in zip(requests, rooms, strict=True)),
        forbids_tokens=bool(body.allowed_token_ids or body.bad_words or body.logit_bias or structure),
        reduced_max_tokens=min((room for room in rooms if room < (params.max_tokens or 0)), default=None),
    )


def _matcher(body: CompletionBody | ChatBody, model: ServedModel, generation: Generation) -> MatcherFactory | None:
    matcher: MatcherFactory | None = None
    if generation.stops:
        matcher = stop_matcher(
            model.tokenizer, generation.stops, skip_special=generation.skip_special, drop_space=generation.drop_space
        )
    if body.stop_regex:
        patterns = [body.stop_regex] if isinstance(body.stop_regex, str) else body.stop_regex
        matcher = both(matcher, stop_regex_matcher(model.tokenizer, patterns, skip_special=generation.skip_special))
    if body.bad_words:
        matcher = both(matcher, bad_words_matcher(model.tokenizer, body.bad_words, model.limits.vocab_size))
    return matcher
