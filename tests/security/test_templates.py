"""Chat templates that attack: no object of Python's is reached, no file is read, and steps and text are bounded.

Each is harmless by construction: it walks to something and prints it. What tests/text/test_chat.py has already (strings
and lists that grow, loops and macros without end, format, batch, tojson's indent, methods of views) is not repeated.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from nano_inference.text import chat, template_guard
from nano_inference.text.chat import chat_template, load_chat_template, render
from nano_inference.text.kinds import Rendering, TokenizerSource
from nano_inference.text.tokenizer import load_tokenizer
from nano_inference.types import BadRequest, ModelError
from tests.security.model_seeds import SPECIALS, tokenizer_config, tokenizer_json

SECRET = "the secret of a file"
MESSAGES = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "world"}]
NAMED = {"bos_token": "<s>", "eos_token": "</s>"}
PYTHON = re.compile(
    r"<(class|function|module|built-in|bound method|frame|code|generator|\w+ object)|0x[0-9a-f]{4}|__\w+__|builtins|"
    r"os\.environ|/usr/|/bin/|\bmro\b|Traceback|site-packages"
)
"""What Python's objects look like when they are printed."""

WALKS = {
    "class of a string": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "class by brackets": "{{ ''['__class__']['__base__']['__subclasses__']() }}",
    "class of a list": "{{ [].__class__.__base__.__subclasses__() }}",
    "class of a number": "{{ (1).__class__ }}{{ 1.5.real }}{{ true.__class__ }}",
    "class of a mapping": "{{ {}.__class__.__init__.__globals__ }}",
    "class of a message": "{{ messages[0].__class__ }}{{ messages[0]['__class__'] }}{{ messages[0].__dict__ }}",
    "slots of a view": "{{ messages._items }}{{ messages[0]._items }}{{ messages[0]['_items'] }}",
    "methods of a view": "{{ messages.__getitem__ }}{{ messages[0].__iter__ }}{{ messages.__init__.__globals__ }}",
    "methods of a collection": "{{ messages[0].get }}{{ messages[0].keys }}{{ messages.index }}{{ messages.count }}",
    "attr": "{{ ''|attr('__class__')|attr('__mro__') }}",
    "attr of a helper": "{{ raise_exception|attr('__globals__') }}",
    "map over attributes": "{{ [messages]|map(attribute='__class__')|list }}",
    "map over attr": "{{ ['']|map('attr', '__class__')|list }}",
    "select by attribute": "{{ messages|selectattr('__class__')|list|length }}",
    "sort by attribute": "{{ messages|sort(attribute='__class__.__name__')|length }}",
    "group by attribute": "{{ messages|groupby('__class__')|list|length }}",
    "hex escapes": r"{{ ''['\x5f\x5fclass\x5f\x5f'] }}",
    "joined name": "{{ ''[['__cl', 'ass__']|join] }}",
    "reversed name": "{{ ''['__ssalc__'|reverse] }}",
    "strftime_now's own": "{{ strftime_now.__globals__ }}{{ strftime_now.__closure__ }}{{ strftime_now._function }}",
    "globals of raise_exception": "{{ raise_exception.__globals__.__builtins__ }}{{ raise_exception['__self__'] }}",
    "the helper itself": "{{ raise_exception }}{{ strftime_now }}{{ range }}{{ namespace }}{{ dict }}",
    "cycler": "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "joiner": "{{ joiner.__init__.__globals__.os }}",
    "namespace": "{{ namespace.__init__.__globals__.os }}",
    "a namespace's own": "{% set ns = namespace(a=1) %}{{ ns.__class__ }}{{ ns.__init__ }}{{ ns._attrs }}",
    "lipsum": "{{ lipsum.__globals__['os'].popen('id').read() }}",
    "url_for": "{{ url_for.__globals__ }}{{ get_flashed_messages.__globals__ }}{{ config.items() }}{{ request }}",
    "self": "{{ self.__init__.__globals__ }}{{ self._TemplateReference__context }}",
    "loop": "{% for m in messages %}{{ loop.__class__ }}{{ loop.__init__ }}{{ loop._iterator }}{% endfor %}",
    "a macro's own": "{% macro m() %}{% endmacro %}{{ m.__class__ }}{{ m._func }}{{ m.__globals__ }}{{ m }}",
    "caller": "{% macro m() %}{{ caller.__class__ }}{% endmacro %}{% call m() %}{% endcall %}",
    "undefined": "{{ nothing.__class__ }}",
    "an imported name": "{{ __import__('os').popen('id').read() }}{{ __builtins__ }}{{ open('/etc/passwd') }}",
    "debug": "{{ debug() }}",
    "context": "{% set x = context %}{{ x }}{{ environment }}{{ _context }}",
    "pprint": "{{ raise_exception|pprint }}",
    "a helper as json": "{{ raise_exception|tojson }}",
    "a helper as text": "{{ raise_exception|string }}{{ strftime_now ~ '' }}",
    "a helper as list": "{{ raise_exception|list }}{{ raise_exception|items }}",
    "format with an attribute": "{{ '{0.__class__}'.format('') }}",
    "format_map": "{{ '{a.__class__}'.format_map({'a': ''}) }}",
    "percent format": "{{ '%s' % raise_exception }}",
}
FILES = {
    "include": "{% include 'FILE' %}",
    "include a template": "{% include 'default' %}",
    "include of many": "{% include ['nothing', 'FILE'] %}",
    "include what may be missing": "{% include 'FILE' ignore missing %}",
    "import": "{% import 'FILE' as x %}{{ x }}",
    "from import": "{% from 'FILE' import a %}{{ a }}",
    "extends": "{% extends 'FILE' %}",
    "extends upwards": "{% extends '../FILE' %}",
    "include in a loop": "{% for m in messages %}{% include 'FILE' %}{% endfor %}",
}
COSTLY = {
    "width of center": "{{ 'a'.center(500000000) }}",
    "width of zfill": "{{ 'a'.zfill(500000000) }}",
    "width of ljust": "{{ 'a'.ljust(500000000) }}",
    "width of expandtabs": "{{ '\t'.expandtabs(500000000) }}",
    "width of a filter": "{{ 'a'|center(500000000) }}",
    "width of wordwrap": "{{ ('a ' * 64)|wordwrap(1, wrapstring='a' * 64)|wordwrap(1, wrapstring='a' * 64) }}" * 400,
    "width of a percent": "{{ '%500000000d' % 1 }}",
    "a power": "{{ 9 ** 9 ** 9 }}",
    "a power of powers": "{{ (2 ** 100000) ** 100000 }}",
    "a shift": "{{ 1 << 100000000 }}",
    "a range": "{{ range(1000000000)|list|length }}",
    "a range that is summed": "{{ range(1000000000)|sum }}",
    "nested ranges": "{% for a in range(3000) %}{% for b in range(3000) %}{% endfor %}{% endfor %}",
    "five nested ranges": "{% for i in range(99) %}" * 5 + "{% endfor %}" * 5,
    "a list times itself": "{% set l = [1] * 100000000 %}{{ l|length }}",
    "a list added to itself": "{% set n = namespace(l=[1]) %}"
    "{% for i in range(60) %}{% set n.l = n.l + n.l %}{% endfor %}",
    "a mapping around itself": "{% set n = namespace(d={}) %}"
    "{% for i in range(99999) %}{% set n.d = {'a': n.d} %}{% endfor %}"
    "{{ n.d|tojson }}",
    "macros that call each other": "{% macro a() %}{{ b() }}{% endmacro %}"
    "{% macro b() %}{{ a() }}{% endmacro %}{{ a() }}",
    "a macro that calls itself twice": "{% macro f(n) %}{% if n %}{{ f(n-1) ~ f(n-1) }}{% endif %}a{% endmacro %}"
    "{{ f(60) }}",
    "a caller that calls": "{% macro m() %}{% call m() %}{{ caller() }}{% endcall %}{% endmacro %}{{ m() }}",
    "a loop that calls itself": "{% for m in [messages] recursive %}{{ loop([m]) }}{% endfor %}",
    "replace upon replace": "{% set s = 'a' * 64 %}" + "{% set s = s|replace('a', s) %}" * 8 + "{{ s }}",
    "join upon join": "{% set s = range(999)|join('aaaa') %}"
    "{% for i in range(9) %}{% set s = s|join(s) %}{{ s }}{% endfor %}",
    "split into all": "{% for i in range(99999) %}{{ messages[0].content.split('')|join('aaaaaaaa') }}{% endfor %}",
    "indent upon indent": "{{ ('a\n' * 64)|indent(60000000) }}",
    "unique of much": "{{ (range(99999)|list + range(99999)|list)|unique|list|sort|reverse|list }}" * 30,
    "filters without end": "{{ messages"
    + "|list" * 1990
    + " }}"
    + "{% for i in range(99999) %}{{ i|string|list }}{% endfor %}",
    "dates without end": "{% for i in range(99999) %}{{ strftime_now('%c%c%c%c%c%c%c%c') }}{% endfor %}",
}
NESTED = {
    "parentheses": "{{ " + "(" * 900 + "1" + ")" * 900 + " }}",
    "lists": "{{ " + "[" * 900 + "]" * 900 + " }}",
    "not": "{{ " + "not " * 1900 + "1 }}",
    "minus": "{{ " + "-" * 1900 + "1 }}",
    "attributes": "{{ a" + ".b" * 900 + " }}",
    "ifs": "{% if 1 %}" * 5000 + "{% endif %}" * 5000,
    "fors": "{% for i in [1] %}" * 2000 + "{% endfor %}" * 2000,
    "an open comment": "{#" * 50_000,
    "open tags": "{{" * 50_000,
    "open strings": "{{ '" * 20_000,
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


def test_there_are_more_than_thirty() -> None:
    assert len(WALKS) + len(FILES) >= 30


@pytest.mark.parametrize("name", WALKS)
def test_no_object_of_python_is_reached(name: str) -> None:
    text = outcome(WALKS[name])
    # A refusal may repeat the name that the template asked for; an object's own text it never has.
    for word in set(re.findall(r"__\w+__", WALKS[name])):
        text = text.replace(word, "")
    # The read-only methods of a view are there to be called, and MiniJinja's own functions have such names.
    text = re.sub(r"<bound method (Mapping|Sequence)\.\w+ of |minijinja::functions::builtins::", "", text)
    assert not PYTHON.search(text), text
    assert len(text) < 1000


@pytest.mark.parametrize("name", FILES)
def test_no_file_is_read(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text(SECRET)
    monkeypatch.chdir(tmp_path)
    for path in ("file", str(tmp_path / "file"), "./file"):
        assert SECRET not in outcome(FILES[name].replace("FILE", path))


@pytest.mark.parametrize("name", COSTLY)
def test_steps_and_text_are_bounded(name: str) -> None:
    text = outcome(COSTLY[name])
    assert len(text) < 2 << 20


@pytest.mark.parametrize("name", NESTED)
def test_deep_templates_render_or_are_refused(name: str) -> None:
    assert len(outcome(NESTED[name])) < 200_000


def test_each_rendering_has_full_fuel() -> None:
    loop = "{% for i in range(99999) %}{% endfor %}"
    template = chat_template(f"{loop}ok", where="m")
    assert [render(template, MESSAGES) for _ in range(6)] == ["ok"] * 6
    assert "too much" in outcome(loop * 6)


def test_steps_are_counted_too() -> None:
    turn = "{% if " + "-" * 100 + "i %}{% endif %}"
    assert outcome(f"{{% for i in range(999) %}}{turn}{{% endfor %}}ok") == "ok"
    assert "takes too many steps" in outcome(f"{{% for i in range(60000) %}}{turn}{{% endfor %}}ok")


def test_a_template_leaves_nothing_behind() -> None:
    """What one rendering sets, the next does not see; nor does the caller's data change."""
    template = chat_template("{{ seen }}{% set seen = messages[0].content %}{{ messages|length }}", where="m")
    before = json.dumps(MESSAGES)
    assert render(template, MESSAGES) == render(template, MESSAGES) == "2"
    assert json.dumps(MESSAGES) == before


@pytest.mark.parametrize("name", sorted(chat.RESERVED | template_guard.OWN))
def test_variables_of_the_caller_do_not_replace_ours(name: str) -> None:
    with pytest.raises(BadRequest, match="is reserved"):
        render(chat_template("x", where="m"), MESSAGES, Rendering(extra={name: 1}))


@pytest.mark.parametrize("name", sorted(template_guard.OWN))
def test_template_cannot_replace_counter(name: str) -> None:
    """`{% set __turn = range %}` let a template write 80 MB."""
    writes = "{% for i in range(90000) %}{{ messages[0].content }}" + "raw text " * 99 + "{% endfor %}"
    for taken in (
        f"{{% set {name} = range %}}",
        f"{{% set a, {name} = range, range %}}",
        f"{{%set {name}%}}{{%endset%}}",
        f"{{% macro {name}(a, b=1) %}}{{% endmacro %}}",
        f"{{% for {name} in [1] %}}",
        f"{{% with {name} = range %}}",
        f"{{% import 'default' as {name} %}}",
        f"{{{{ {name} }}}}",
    ):
        assert outcome(taken + writes) == f"m.gguf: the chat template uses the reserved name {name}"
    assert outcome(f"{{{{ '{name}' }}}}{name}") == name * 2
    assert "writes too much text" in outcome(writes)


@pytest.mark.parametrize(
    "content", [*list(WALKS.values())[:6], "{% include '/etc/passwd' %}", "{{ 7 * 7 }}", "{#", "{%"]
)
def test_message_content_is_not_interpreted(content: str) -> None:
    source = "{% for m in messages %}[{{ m.role }}|{{ m.content }}]{% endfor %}"
    messages = [{"role": content, "content": content}]
    assert outcome(source, messages) == f"[{content}|{content}]"


@pytest.mark.parametrize("place", ["bos_token", "chat_template", "jinja"])
def test_templates_of_a_directory_are_guarded_alike(place: str, tmp_path: Path) -> None:
    config = tokenizer_config()
    source = "{% for i in range(90000) %}{% for i in range(90000) %}{% endfor %}{% endfor %}"
    config["chat_template"] = "{{ bos_token }}{{ messages[0].content }}"
    if place == "chat_template":
        config["chat_template"] = source
    if place == "bos_token":  # the text of a token is data, never a template
        config["bos_token"] = SPECIALS[0]
        config["eos_token"] = "{{ 7 * 7 }}"
        config["chat_template"] = "{{ eos_token }}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
    if place == "jinja":
        (tmp_path / "chat_template.jinja").write_text(source)
    found = TokenizerSource(str(tmp_path))
    template = load_chat_template(found, load_tokenizer(found))
    assert template is not None
    if place == "bos_token":
        assert render(template, MESSAGES) == "{{ 7 * 7 }}"
    else:
        with pytest.raises(ModelError, match=r"takes too many steps|writes too much"):
            render(template, MESSAGES)
