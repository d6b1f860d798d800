"""Render messages with a model's chat template, as text or as token ids.

Templates are untrusted code from a model's files. `sandbox` renders them as Transformers does, within limits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import count, groupby
from os.path import commonprefix
from pathlib import Path
from types import MappingProxyType
from typing import Any

from nano_inference.support.files import MAX_JSON_BYTES, is_present, read_file
from nano_inference.text.fast import read_json
from nano_inference.text.kinds import ANSWER, Rendering, Tokenizer, TokenizerSource
from nano_inference.text.kinds import Message as Message
from nano_inference.text.reasoning import CLOSE_MARK, OPEN_MARK
from nano_inference.text.templates import TEMPLATES, Program, TemplateRefusal, plain
from nano_inference.text.tool_format import takes_text, tool_format
from nano_inference.types import BadRequest, ModelError

RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"})
"""Variable names that `extra` must not contain."""

_REASONING = ("reasoning_content", "thinking", "reasoning")  # names of a message's reasoning, in Transformers' order
_NOTHING: Mapping[str, Any] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplate:
    """A compiled chat template; safe to share between threads."""

    source: str  # the text of the model's file, unchanged
    where: str  # the template's file, for error messages
    named: Mapping[str, str]
    """Variables of every rendering: those of `bos_token`, `eos_token`, … that the tokenizer has."""
    tool_source: str | None  # the template named "tool_use", which replaces `source` when a request has tools
    programs: Mapping[str, Program] = field(repr=False, compare=False)
    """The compiled templates, "default" and perhaps "tool_use"."""

    def program(self, tools: object) -> Program:
        """Return the template for a request with or without tools."""
        return self.programs["default" if tools is None else "tool_use" if "tool_use" in self.programs else "default"]


def load_chat_template(source: TokenizerSource, tokenizer: Tokenizer) -> ChatTemplate | None:
    """Return a model's compiled chat template, None if it has none.

    In a directory chat_template.jinja has precedence over chat_template.json, and that over tokenizer_config.json, as
    in transformers; a GGUF file has `tokenizer.chat_template`. Raises `ModelError` if the template does not compile or
    `sandbox` refuses it.
    """
    if source.gguf is not None:
        found = source.gguf.get("tokenizer.chat_template")
        tools = source.gguf.get("tokenizer.chat_template.tool_use")
        templates = {"default": found, "tool_use": tools}
    else:
        templates = _templates_of(Path(source.path))
    chosen = {name: text for name, text in templates.items() if isinstance(text, str) and text}
    if "default" not in chosen:
        return None
    _special_pattern(tokenizer)  # cached; thousands of tokens take a second
    return chat_template(
        chosen["default"], where=source.path, named=tokenizer.named, tool_source=chosen.get("tool_use")
    )


def given_template(text: str | None, path: str | None, tokenizer: Tokenizer) -> ChatTemplate:
    """Return the compiled chat template of a text, or of the file at `path`; the text may be a name of `TEMPLATES`.

    Raises `ModelError` as `load_chat_template` does.
    """
    where = "--chat-template"
    if path is not None:
        where = path
        try:
            text = read_file(Path(path), MAX_JSON_BYTES, "a chat template").decode("utf-8")
        except UnicodeDecodeError as error:
            raise ModelError(f"{path}: cannot be read: {error}") from None
    assert text is not None, "a text or a path is given"
    named = tokenizer.named
    if text in TEMPLATES and not tokenizer.encode(""):  # texts of this model begin without a BOS
        named = {name: value for name, value in named.items() if name != "bos_token"}
    text = TEMPLATES.get(text, text)
    _special_pattern(tokenizer)  # cached; thousands of tokens take a second
    return chat_template(text, where=where, named=named)


def chat_template(
    source: str, *, where: str, named: Mapping[str, str] = _NOTHING, tool_source: str | None = None
) -> ChatTemplate:
    """Compile a chat template from its text.

    Raises `ModelError` naming `where` and the wrong line.
    """
    from nano_inference.text.sandbox import compile_template  # imports Jinja

    sources = {"default": source} if tool_source is None else {"default": source, "tool_use": tool_source}
    return ChatTemplate(
        source=source,
        where=where,
        named=MappingProxyType(dict(named)),
        tool_source=tool_source,
        programs={name: compile_template(text, where) for name, text in sources.items()},
    )


def render(template: ChatTemplate, messages: Sequence[Message], rendering: Rendering = ANSWER) -> str:
    """Return the prompt text of these messages.

    The text equals that of Transformers. Several system messages are joined for a template that refuses or drops them.
    Raises `BadRequest` for malformed messages and for those the template refuses, `TemplateLimit`, a `ModelError`, for
    a template that exceeds a limit on depth, memory or output.
    """
    check_messages(messages)
    if rendering.continue_final:  # with a mark at the end of the last message, and cut at the mark
        last = messages[-1]
        if rendering.add_generation_prompt:
            raise BadRequest("", "continue_final_message and add_generation_prompt exclude each other")
        if not isinstance(last.get("content"), str):
            raise BadRequest("", "continue_final_message needs a last message whose content is a text")
        mark = _unused_character([messages, rendering.tools, rendering.extra, template.source])
        marked = [*messages[:-1], {**last, "content": last["content"] + mark}]
        text = render(template, marked, replace(rendering, continue_final=False))
        if mark not in text:
            raise BadRequest("continue_final_message", "the chat template changes the last message's content")
        return text[: text.rindex(mark)].replace(mark, "")  # a template may write a message twice
    taken = sorted(RESERVED & set(rendering.extra))
    if taken:
        raise BadRequest("", f"chat template variable {taken[0]!r} is reserved")
    joined = with_one_system_message(messages)
    if joined is None:
        return _run(template, messages, rendering)
    texts = [message["content"].strip() for message in messages if message["role"] == "system"]
    try:
        text = _run(template, messages, rendering)
        if all(one in text for one in texts):
            return text
    except TemplateRefusal:
        return _run(template, joined, rendering)
    try:
        other = _run(template, joined, rendering)
    except TemplateRefusal:
        return text
    return other if all(one in other for one in texts) else text


def _run(template: ChatTemplate, messages: Sequence[Message], rendering: Rendering) -> str:
    program = template.program(rendering.tools)
    source = template.source if template.tool_source is None or rendering.tools is None else template.tool_source
    functions = {}
    if takes_text(source):
        described = [tool["function"] for tool in rendering.tools or ()]
        functions["functions"] = json.dumps(described, ensure_ascii=False, indent=4) if described else ""
    data = {
        **template.named,
        **functions,
        **plain(rendering.extra, "extra"),
        "messages": [_with_reasoning(message, program.reads) for message in plain(messages, "messages")],
        "tools": plain(rendering.tools, "tools"),
        "documents": None,
        "add_generation_prompt": rendering.add_generation_prompt,
    }
    return program.run(data)


def _with_reasoning(message: dict[str, Any], reads: frozenset[str]) -> dict[str, Any]:
    """Return a message with its reasoning under Transformers' names, and under the only one that the template reads."""
    reasoning = next((message[key] for key in _REASONING if message.get(key) is not None), None)
    if reasoning is None:
        return message
    if "reasoning" in reads and reads.isdisjoint(("reasoning_content", "thinking")):
        message = {"reasoning": reasoning, **message}
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def with_one_system_message(messages: Sequence[Message]) -> list[Message] | None:
    """Return messages with all system messages joined to the first; None if there is only one, in its place."""
    systems = [message for message in messages if message.get("role") == "system"]
    if not systems or (len(systems) == 1 and messages[0] is systems[0]):
        return None
    if not all(isinstance(message.get("content"), str) for message in systems):
        return None
    content = "\n\n".join(message["content"] for message in systems if message["content"])
    return [{**systems[0], "content": content}, *(message for message in messages if message.get("role") != "system")]


def encode_chat(
    template: ChatTemplate, tokenizer: Tokenizer, messages: Sequence[Message], rendering: Rendering = ANSWER
) -> list[int]:
    """Return the token ids of the rendered messages; the template alone decides whether they begin with BOS.

    The text of a special token inside a message is encoded as plain text, so that a message cannot forge a turn. Only
    in the assistant's messages the marks of reasoning and of calls, and texts that the template looks for, are tokens
    as in the model's own answer. Raises as `render` does, and `BadRequest` if the tokenizer cannot encode such a
    message as plain text: splitting at special tokens must not change the ids (one that strips spaces there does).
    """
    text, mark = _render_marked(template, tokenizer, messages, rendering)
    special = _special_pattern(tokenizer)
    if not mark or mark not in text or special is None:
        return tokenizer.encode(text, add_special=False)

    def encoded(text: str, mark: str) -> list[int]:
        """Encode a text in which special tokens with a mark are plain text."""
        ids, at = list[int](), 0
        for match in (*special.finditer(text), None):
            plain = text[at : match and match.start()].replace(mark, "")
            ids += tokenizer.encode(plain, add_special=False, parse_special=False) if plain else ()
            if match is not None:
                ids += tokenizer.encode(match.group(), add_special=False)
                at = match.end()
        return ids

    unmarked = text.replace(mark, "x")
    if encoded(unmarked, "") != tokenizer.encode(unmarked, add_special=False):
        raise BadRequest("", "a message contains a special token, which this model's tokenizer cannot encode as text")
    return encoded(text, mark)


def chat_text(
    template: ChatTemplate, tokenizer: Tokenizer, messages: Sequence[Message], rendering: Rendering = ANSWER
) -> str:
    """Return the text whose token ids `encode_chat` returns. Raises as `render` does."""
    text, mark = _render_marked(template, tokenizer, messages, rendering)
    return text.replace(mark, "") if mark else text


def _render_marked(
    template: ChatTemplate, tokenizer: Tokenizer, messages: Sequence[Message], rendering: Rendering
) -> tuple[str, str]:
    """Return the rendered text and the character that it has in each special token of a message; "" for none."""
    special = _special_pattern(tokenizer)
    given = [messages, rendering.tools, rendering.extra]
    if special is None or not any(special.search(text) for text in _strings(given)):
        return render(template, messages, rendering), ""
    check_messages(messages)
    calls = tool_format(template.tool_source or template.source)
    seeks = (OPEN_MARK, CLOSE_MARK, calls.begin, calls.end, *template.program(rendering.tools).seeks)
    mark = _unused_character([*given, template.source])

    def marked(value: Any, pattern: re.Pattern[str] | None) -> Any:
        if pattern is None:
            return value
        return _map_strings(value, lambda text: pattern.sub(lambda m: m[0][0] + mark + m[0][1:], text))

    texts = (tokenizer.token_text(token) for token in tokenizer.special_ids)
    in_answers = literal_pattern(frozenset(text for text in texts if not any(text in sought for sought in seeks)))
    seen = [marked(message, in_answers if message["role"] == "assistant" else special) for message in messages]
    changed = replace(rendering, tools=marked(rendering.tools, special), extra=marked(rendering.extra, special))
    return render(template, seen, changed), mark


def check_messages(messages: object) -> None:
    """Raise `BadRequest` naming the index unless each message has a role and a string content (or tool calls)."""
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence) or not messages:
        raise BadRequest("messages", "must be a non-empty list")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise BadRequest(f"messages[{index}]", f"must be an object, not {type(message).__name__}")
        if not isinstance(message.get("role"), str) or not message["role"]:
            raise BadRequest(f"messages[{index}].role", "must be a non-empty string")
        content = message.get("content")
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise BadRequest(f"messages[{index}].content", f"must be a string, not {type(content).__name__}")


def _templates_of(directory: Path) -> dict[str, Any]:
    """Return a directory's templates by name. As in Transformers, files replace what the JSON files name."""
    value: Any = None
    for name in ("chat_template.json", "tokenizer_config.json"):
        value = value or read_json(directory / name).get("chat_template")
    entries = [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []
    found = {str(entry.get("name")): entry.get("template") for entry in entries} or {"default": value}
    for path, name in (
        (directory / "chat_template.jinja", "default"),
        (directory / "additional_chat_templates" / "default.jinja", "default"),
        (directory / "additional_chat_templates" / "tool_use.jinja", "tool_use"),
    ):
        if is_present(path):
            if name == "default":
                found = {}  # chat_template.jinja also replaces the JSON files' template for tools
            try:
                found[name] = read_file(path, MAX_JSON_BYTES, "a chat template").decode("utf-8")
            except UnicodeDecodeError as error:
                raise ModelError(f"{path}: cannot be read: {error}") from None
    return found


def _strings(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(str(key)): _map_strings(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_map_strings(item, change) for item in value]
    return value


def _special_pattern(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """Return a pattern that matches the text of any special token; None without special tokens."""
    return literal_pattern(frozenset(tokenizer.token_text(token) for token in tokenizer.special_ids))


def _unused_character(values: Any) -> str:
    """Return a private-use character that occurs in none of the texts."""
    used = set().union(*map(set, _strings(values)))
    free = next((chr(code) for code in range(0xE000, 0xF900) if chr(code) not in used), None)
    if free is None:
        raise BadRequest("", "the messages use every private-use character of Unicode")
    return free


_MAX_DEPTH = 32  # limit on nested groups; `re` compiles some hundreds


@lru_cache(maxsize=8)
def literal_pattern(texts: frozenset[str]) -> re.Pattern[str] | None:
    """Return a pattern that finds the leftmost, longest of the texts, ignoring empty ones; None without texts."""
    found = sorted(texts - {""})
    return re.compile(_trie(found, 0, 0)) if found else None


def _trie(texts: Sequence[str], start: int, depth: int) -> str:
    """Return a pattern for the suffixes from `start` of sorted texts with the same first `start` characters."""
    if depth == _MAX_DEPTH:
        ends = sorted((text[start:] for text in texts), key=len, reverse=True)
        return f"(?:{'|'.join(map(re.escape, ends))})"
    branches = []
    for _, group in groupby((text for text in texts if len(text) > start), key=lambda text: text[start]):
        same = list(group)
        end = len(commonprefix([same[0], same[-1]]))  # noqa: RUF071  of characters
        rest = "" if len(same[-1]) == end else _trie(same, end, depth + 1)
        branches.append(re.escape(same[0][start:end]) + rest)
    body = "|".join(branches)
    is_optional = len(texts[0]) == start
    return f"(?:{body})?" if is_optional and body else f"(?:{body})"


_QUESTION: Message = {"role": "user", "content": "question"}


def encode_chat_delta(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    sampled: Sequence[int],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    extra: Mapping[str, Any] = _NOTHING,
) -> list[int]:
    """Return the ids to append after an assistant's turn: the end of that turn, the new messages, the next header.

    Sampled tokens are kept, because encoding their text may give other ids. All that follows the answer in a made-up
    chat of a question, a one-word answer and the new messages is the result.

    `sampled` are the turn's tokens. If they end with the template's end-of-turn token, or another of the tokenizer's
    end tokens in its place, the result starts after it; otherwise the turn was truncated and the result ends it. Pass
    all tokens since the first prompt to have the earlier turns checked as well.

    The text of the prompt, the turns and the results together equals the template's rendering of the whole chat, except
    for spaces that the template adds around an answer or strips from it. Raises `ModelError`, a `ValueError`, showing
    the difference, for a template that changes an earlier turn once messages follow it (drops its thinking, moves the
    tools); `BadRequest` as `encode_chat` does.
    """

    def chat(answer: str, more: Sequence[Message]) -> list[Message]:
        return [_QUESTION, {"role": "assistant", "content": answer}, *more]

    def text_of(answer: str, more: Sequence[Message]) -> str:
        return render(template, chat(answer, more), replace(rendering, add_generation_prompt=bool(more)))

    rendering = Rendering(tools=tools, extra=extra)
    check_messages(messages)
    answer = tokenizer.decode(sampled, skip_special=False)  # only compared, never encoded
    before, after = text_of(answer, ()), text_of(answer, messages)
    if not after.startswith(before):
        at = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(after))
        raise ModelError(
            f"{template.where}: the chat template rewrites earlier turns when messages follow, so the sampled tokens "
            f"cannot be kept: {before[at : at + 40]!r} becomes {after[at : at + 40]!r}"
        )
    word = next(word for i in count() if (word := f"answer{i}") not in after)
    head, _, delta = text_of(word, messages).partition(word)
    added = after[len(before) :]
    if not (after.endswith(delta) and delta.endswith(added)):
        raise ModelError(f"{template.where}: in this chat template the text after an answer depends on the answer")
    ids = encode_chat(template, tokenizer, chat(word, messages), rendering)
    head_ids = tokenizer.encode(head + word, add_special=False)
    if ids[: len(head_ids)] != head_ids:
        raise ModelError(f"{template.where}: this tokenizer joins the end of an answer with what follows it")
    # Drop the end of turn if `sampled` ends with one; `tail` is the template's, as text.
    ids, tail = ids[len(head_ids) :], delta.removesuffix(added)
    ends = tokenizer.special_ids.union(tokenizer.eos_ids)
    end = next((i for i, token in enumerate(ids) if token in ends), None)
    if end is None or not sampled or tokenizer.decode(ids[:end]).strip():
        return ids
    is_same = sampled[-1] == ids[end]
    is_another = sampled[-1] in tokenizer.eos_ids and tail.lstrip().startswith(tokenizer.token_text(ids[end]))
    return ids[end + 1 :] if is_same or is_another else ids
