"""The web pages: each one file without any outside part, put together from the small modules in `web/`.

A page's HTML names its style sheets, scripts and modules as it would on a static server; here they are written into it.
Modules are joined in the order of their imports, `import` and `export` taken away, so their names share one scope
(tests/web holds them apart). A script marked `data-later` stays a file of its own (`LATER`), which the page loads when
it is needed. The policy that comes with a page names every script and style by its digest (CSP level 3), so nothing
else in it can run.
"""

from __future__ import annotations

import gzip
import re
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from importlib.resources import files
from posixpath import dirname, join, normpath

from starlette.requests import Request
from starlette.responses import Response

_STYLE = re.compile(r'<link rel="stylesheet" href="([^"]+)" ?/?>')
_SCRIPT = re.compile(r'<script( type="module")? src="([^"]+)"></script>')
_LATER_SCRIPT = re.compile(r'<script data-later src="([^"]+)"></script>')
_IMPORT = re.compile(r'^import [^;]*?from "([^"]+)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export ", re.MULTILINE)
_COMMENT = re.compile(r"^[ ]*(?:/\*\*?.*?\*/|//[^\n]*)\n", re.MULTILINE | re.DOTALL)
"""A comment on lines of its own, in what this project wrote; libraries keep theirs, which name their licences."""
_REMARK = re.compile(r"(?<=[;,{}()\]]) // [^\n]*$", re.MULTILINE)
_INDENT = re.compile(r"^[ ]+", re.MULTILINE)
_INLINE_SCRIPT = re.compile(r"<script>(.*?)</script>", re.DOTALL)
_INTEGRITY = re.compile(r'<script src="[^"]+" integrity="([^"]+)">')
_INLINE_STYLE = re.compile(r"<style>(.*?)</style>", re.DOTALL)

LATER: Mapping[str, tuple[str, str]] = {"formulas.js": ("vendor/temml.js", "formulas/main.js")}
"""Files that a page loads when it needs them, each at a path of its own: a library, and the module that uses it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """One page, or one file of a page, ready to be sent."""

    body: bytes
    """UTF-8."""
    packed: bytes
    """The same under gzip."""
    policy: str
    """Its Content-Security-Policy."""
    tag: str
    """Its ETag."""
    media_type: str = "text/html"


def load_page(name: str) -> Page:
    """Put the page together that lies in `web/NAME/page.html`, or the file `NAME` of `LATER`."""
    if name in LATER:
        return _page(_later(name), "default-src 'none'", "text/javascript")
    html = bundled(f"{name}/page.html")
    return _page(html, policy_of(html), "text/html")


def _page(text: str, policy: str, media_type: str) -> Page:
    body = text.encode()
    tag = f'"{sha256(body).hexdigest()[:32]}"'
    return Page(body=body, packed=gzip.compress(body, 9, mtime=0), policy=policy, tag=tag, media_type=media_type)


def bundled(path: str) -> str:
    """Return the HTML of a file below `web/`, everything that it names written into it."""
    here = dirname(path)

    def style(found: re.Match[str]) -> str:
        return f"<style>\n{_bare(_read(join(here, found[1])))}</style>"

    def script(found: re.Match[str]) -> str:
        source = normpath(join(here, found[2]))
        text = joined_modules(source) if found[1] else _read(source)
        assert "</script" not in text.lower(), f"{source} would end its own element"
        return f"<script>\n{text}</script>"

    def later(found: re.Match[str]) -> str:
        return f'<script src="{found[1]}" integrity="{_hash(_later(found[1]))}"></script>'

    return _LATER_SCRIPT.sub(later, _SCRIPT.sub(script, _STYLE.sub(style, _read(path))))


def _later(name: str) -> str:
    library, module = LATER[name]
    return _read(library) + joined_modules(module)


def joined_modules(entry: str) -> str:
    """Return a module and all that it imports as one strict script in a scope of its own, each once, imports first."""
    parts = (_bare(_EXPORT.sub("", _IMPORT.sub("", _read(path)))) for path in module_paths(entry))
    return '(() => {\n"use strict";\n' + "\n".join(parts) + "})();\n"


def module_paths(entry: str) -> list[str]:
    """Return the paths of a module and of all that it imports, each once, imports first."""
    paths: list[str] = []

    def visit(path: str) -> None:
        for imported in _IMPORT.findall(_read(path)):
            visit(normpath(join(dirname(path), imported)))
        if path not in paths:
            paths.append(path)

    visit(entry)
    return paths


def policy_of(html: str) -> str:
    """Return the policy under which a page's own scripts and styles run, and nothing else (serving.md B 28).

    A file loaded later is named by the digest that its element demands: 'self' would allow whatever else is served
    here. Trusted Types besides: only DOMPurify may turn a text into HTML.
    """
    hashes = [*(_hash(text) for text in _INLINE_SCRIPT.findall(html)), *_INTEGRITY.findall(html)]
    scripts = " ".join(f"'{one}'" for one in hashes)
    styles = " ".join(f"'{_hash(text)}'" for text in _INLINE_STYLE.findall(html))
    return (
        f"default-src 'none'; script-src {scripts}; style-src 'self' {styles}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types dompurify"
    )


def page_response(page: Page, request: Request) -> Response:
    """Return a page as this browser takes it; nothing but a 304 for one that has it already."""
    headers = {
        "content-security-policy": page.policy,
        "cache-control": "no-cache",
        "etag": page.tag,
        "vary": "accept-encoding",
    }
    if request.headers.get("if-none-match") == page.tag:
        return Response(status_code=304, headers=headers)
    if "gzip" not in request.headers.get("accept-encoding", ""):
        return Response(page.body, media_type=page.media_type, headers=headers)
    return Response(page.packed, media_type=page.media_type, headers={**headers, "content-encoding": "gzip"})


def _bare(text: str) -> str:
    """Return a source without comments and indentation, which no text in it depends on (tests/web holds that)."""
    return _INDENT.sub("", _REMARK.sub("", _COMMENT.sub("", text)))


def _read(path: str) -> str:
    return (files("nano_inference") / "web" / normpath(path)).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"
