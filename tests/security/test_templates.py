"""Chat templates that attack: no object of Python's is reached, no file is read, the text is bounded.

Each is harmless by construction: it walks to something and prints it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from nano_inference.text import chat
from nano_inference.text.chat import chat_template, load_chat_template, render
from nano_inference.text.kinds import Rendering, TokenizerSource
from nano_inference.text.tokenizer import load_tokenizer
from nano_inference.types import BadRequest, ModelError
from tests.security.model_seeds import tokenizer_config, tokenizer_json

SECRET = "the secret of a file"
MESSAGES = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "world"}]
NAMED = {"bos_token": "<s>", "eos_token": "</s>"}
PYTHON = re.compile(r"<(class|module|frame|code|generator|\w+ object)|__\w+__|builtins|os\.environ|/usr/|/bin/|root:")
"""What Python's objects look like when they are printed."""

WALKS = {
    "class of a string": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "class by brackets": "{{ ''['__class__']['__base__']['__subclasses__']() }}",
    "class of a message": "{{ messages[0].__class__ }}{{ messages[0]['__class__'] }}{{ messages[0].__dict__ }}",
    "slots of a view": "{{ messages._items }}{{ messages[0]._items }}{{ messages[0]['_items'] }}",
    "methods of a view": "{{ messages.__getitem__ }}{{ messages[0].__iter__ }}{{ messages.__init__.__globals__ }}",
    "methods of a collection": "{{ messages[0].get }}{{ messages[0].keys }}{{ messages.index }}{{ messages.count }}",
    "attr": "{{ ''|attr('__class__')|attr('__mro__') }}",
    "map over attributes": "{{ [messages]|map(attribute='__class__')|list }}",
    "sort by attribute": "{{ messages|sort(attribute='__class__.__name__')|length }}",
    "hex escapes": r"{{ ''['\x5f\x5fclass\x5f\x5f'] }}",
    "joined name": "{{ ''[['__cl', 'ass__']|join] }}",
    "strftime_now's own": "{{ strftime_now.__globals__ }}{{ strftime_now.__closure__ }}{{ strftime_now._function }}",
    "the helper itself": "{{ raise_exception }}{{ strftime_now }}{{ range }}",
    "cycler": "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "a namespace's own": "{% set ns = namespace(a=1) %}{{ ns.__class__ }}{{ ns.__init__ }}{{ ns._attrs }}",
    "lipsum": "{{ lipsum.__globals__['os'].popen('id').read() }}",
    "url_for": "{{ url_for.__globals__ }}{{ get_flashed_messages.__globals__ }}{{ config.items() }}{{ request }}",
    "self": "{{ self.__init__.__globals__ }}{{ self._TemplateReference__context }}",
    "loop": "{% for m in messages %}{{ loop.__class__ }}{{ loop.__init__ }}{{ loop._iterator }}{% endfor %}",
    "a macro's own": "{% macro m() %}{% endmacro %}{{ m.__class__ }}{{ m._func }}{{ m.__globals__ }}{{ m }}",
    "an imported name": "{{ __import__('os').popen('id').read() }}{{ __builtins__ }}{{ open('/etc/passwd') }}",
    "debug": "{{ debug() }}",
    "context": "{% set x = context %}{{ x }}{{ environment }}{{ _context }}",
    "pprint": "{{ raise_exception|pprint }}",
    "a helper as text": "{{ raise_exception|string }}{{ strftime_now ~ '' }}",
    "format with an attribute": "{{ '{0.__class__}'.format('') }}",
    "format_map": "{{ '{a.__class__}'.format_map({'a': ''}) }}",
    "percent format": "{{ '%s' % raise_exception }}",
    # CVE-2016-10745, CVE-2019-10906, CVE-2024-56326 and CVE-2025-27516: str.format and format_map, called in other ways
    "format by item": "{{ '{0.__class__}'['format']('') }}",
    "format as a variable": "{% set f = '{0.__class__}'.format %}{{ f('') }}",
    "format by attr": "{{ ('{0.__class__}'|attr('format'))('') }}",
    "format in a namespace": "{% set n = namespace(f='{0.__class__}'.format) %}{{ n.f('') }}",
    "format of markup": "{{ ('{0.__class__}'|safe).format('') }}{{ ('{0.__class__}'|e).format_map({'0': ''}) }}",
    # CVE-2024-56201: names of templates and of blocks become code
    "a block's name": "{% block __class__ %}{{ self.__class__ }}{% endblock %}",
    "an imported name's form": "{% from messages import a as __class__ %}",
    # CVE-2014-1402, CVE-2024-22195, CVE-2024-34064 are of caches and of xmlattr
    "xmlattr": "{{ {'a onclick=__class__': 1}|xmlattr }}{{ {'__class__': ''.__class__}|xmlattr }}",
    "frames of a generator": "{% set g = messages|map(attribute='role') %}{{ g.gi_frame }}{{ g['gi_code'] }}",
    "mro of a class": "{{ dict.mro() }}{{ namespace.mro() }}{{ joiner.mro() }}",
    "a namespace with an underscore": "{{ namespace(__class__=1) }}",
    "a namespace set later": "{% set n = namespace() %}{% set n.__class__ = dict %}{{ n.a }}",
    "filter block with attr": "{% filter attr('__class__') %}x{% endfilter %}",
    "generation's extension": "{% generation %}{{ caller.__globals__ }}{% endgeneration %}",
    "a slice": "{{ messages['__class__':] }}{{ messages[:'__class__'] }}",
    "autoescape": "{% autoescape true %}{{ ('<'|e).__class__ }}{{ ('<'|e)['__html__']() }}{% endautoescape %}",
}
FILES = {
    "include": "{% include 'FILE' %}",
    "include of many": "{% include ['nothing', 'FILE'] %}",
    "import": "{% import 'FILE' as x %}{{ x }}",
    "from import": "{% from 'FILE' import a %}{{ a }}",
    "extends": "{% extends 'FILE' %}",
}
COSTLY = {
    "a power": "{{ 9 ** 9 ** 9 }}",
    "a shift": "{{ 1 << 100000000 }}",
    "a repeated text": "{{ 'a' * 10 ** 10 }}",
    "a range": "{{ range(1000000000)|list|length }}",
    "text in a loop": "{% for i in range(99999) %}" + "raw text " * 999 + "{% endfor %}",
    "a nested mapping": "{% set n = namespace(d={}) %}{% for i in range(99999) %}{% set n.d = {'a': n.d} %}{% endfor %}"
    "{{ n.d|tojson }}",
    "mutual macros": "{% macro a() %}{{ b() }}{% endmacro %}{% macro b() %}{{ a() }}{% endmacro %}{{ a() }}",
    "a caller that calls": "{% macro m() %}{% call m() %}{{ caller() }}{% endcall %}{% endmacro %}{{ m() }}",
    "a loop that calls itself": "{% for m in [messages] recursive %}{{ loop([m]) }}{% endfor %}",
    "a namespace in itself": "{% set n = namespace() %}{% set n.n = [n, n] %}{{ n }}{{ n.n }}",
    "lorem ipsum": "{{ lipsum(1000000000) }}",
}
NESTED = {
    "parentheses": "{{ " + "(" * 900 + "1" + ")" * 900 + " }}",
    "not": "{{ " + "not " * 1900 + "1 }}",
    "attributes": "{{ a" + ".b" * 900 + " }}",
    "ifs": "{% if 1 %}" * 5000 + "{% endif %}" * 5000,
    "an open comment": "{#" * 50_000,
    "open tags": "{{" * 50_000,
    "conditions": "{{ " + "1 if 1 else " * 450 + "1 }}",
}


def outcome(source: str, messages: list[dict[str, Any]] = MESSAGES, where: str = "m.gguf") -> str:
    """Render a template; return its text, or the one line with which it is refused."""
    try:
        return render(chat_template(source, where=where, named=NAMED), messages)
    except (ModelError, BadRequest) as error:
        text = str(error)
        assert "\n" not in text and len(text) < 2000
        return text


@pytest.mark.parametrize("name", WALKS)
def test_no_object_of_python_is_reached(name: str) -> None:
    text = outcome(WALKS[name])
    # A refusal may repeat the name that the template asked for; an object's own text it never has.
    for word in {"__class__", *re.findall(r"__\w+__", WALKS[name])}:
        text = text.replace(word, "")
    assert not PYTHON.search(text), text
    assert len(text) < 1000


@pytest.mark.parametrize("name", FILES)
def test_no_file_is_read(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text(SECRET)
    monkeypatch.chdir(tmp_path)
    for path in ("file", str(tmp_path / "file"), "./file"):
        assert SECRET not in outcome(FILES[name].replace("FILE", path))


@pytest.mark.parametrize("name", COSTLY)
def test_text_and_single_operations_are_bounded(name: str) -> None:
    assert len(outcome(COSTLY[name])) < 200


@pytest.mark.parametrize("name", NESTED)
def test_deep_templates_render_or_are_refused(name: str) -> None:
    assert len(outcome(NESTED[name])) < 200_000


@pytest.mark.parametrize("name", sorted(chat.RESERVED))
def test_variables_of_the_caller_do_not_replace_ours(name: str) -> None:
    with pytest.raises(BadRequest, match="is reserved"):
        render(chat_template("x", where="m"), MESSAGES, Rendering(extra={name: 1}))


@pytest.mark.parametrize(
    "content", [*list(WALKS.values())[:6], "{% include '/etc/passwd' %}", "{{ 7 * 7 }}", "{#", "{%"]
)
def test_message_content_is_not_interpreted(content: str) -> None:
    source = "{% for m in messages %}[{{ m.role }}|{{ m.content }}]{% endfor %}"
    messages = [{"role": content, "content": content}]
    assert outcome(source, messages) == f"[{content}|{content}]"


@pytest.mark.parametrize("place", ["chat_template", "jinja"])
def test_templates_of_a_directory_are_checked_alike(place: str, tmp_path: Path) -> None:
    source = "{{ ''.__class__ }}"
    config = tokenizer_config() | {"chat_template": source if place == "chat_template" else ""}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
    if place == "jinja":
        (tmp_path / "chat_template.jinja").write_text(source)
    found = TokenizerSource(str(tmp_path))
    with pytest.raises(ModelError, match="may not use '__class__'"):
        load_chat_template(found, load_tokenizer(found))
