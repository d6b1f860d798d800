"""The web pages: each one file without any outside part, put together from the small modules in `web/`.

A page's HTML names its style sheets, scripts and modules as it would on a static server; here they are written into it.
Modules are joined in the order of their imports, `import` and `export` taken away, so their names share one scope
(tests/web holds them apart). The policy that comes with a page names every script and style by its digest (CSP level
3), so nothing else in it can run.
"""

from __future__ import annotations

import gzip
import re
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from importlib.resources import files
from posixpath import dirname, join, normpath

from starlette.requests import Request
from starlette.responses import Response

_STYLE = re.compile(r'<link rel="stylesheet" href="([^"]+)" ?/?>')
_SCRIPT = re.compile(r'<script( type="module")? src="([^"]+)"></script>')
_IMPORT = re.compile(r'^import [^;]*?from "([^"]+)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export ", re.MULTILINE)
_COMMENT = re.compile(r"^[ ]*(?:/\*\*?.*?\*/|//[^\n]*)\n", re.MULTILINE | re.DOTALL)
"""A comment on lines of its own, in what this project wrote; libraries keep theirs, which name their licences."""
_INLINE_SCRIPT = re.compile(r"<script>(.*?)</script>", re.DOTALL)
_INLINE_STYLE = re.compile(r"<style>(.*?)</style>", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """One page, ready to be sent."""

    body: bytes
    """UTF-8."""
    packed: bytes
    """The same under gzip."""
    policy: str
    """Its Content-Security-Policy."""
    tag: str
    """Its ETag."""


def load_page(name: str) -> Page:
    """Put the page together that lies in `web/NAME/page.html`."""
    html = bundled(f"{name}/page.html")
    body = html.encode()
    return Page(
        body=body,
        packed=gzip.compress(body, 9, mtime=0),
        policy=policy_of(html),
        tag=f'"{sha256(body).hexdigest()[:32]}"',
    )


def bundled(path: str) -> str:
    """Return the HTML of a file below `web/`, everything that it names written into it."""
    here = dirname(path)

    def style(found: re.Match[str]) -> str:
        return f"<style>\n{_COMMENT.sub('', _read(join(here, found[1])))}</style>"

    def script(found: re.Match[str]) -> str:
        source = normpath(join(here, found[2]))
        text = joined_modules(source) if found[1] else _read(source)
        assert "</script" not in text.lower(), f"{source} would end its own element"
        return f"<script>\n{text}</script>"

    return _SCRIPT.sub(script, _STYLE.sub(style, _read(path)))


def joined_modules(entry: str) -> str:
    """Return a module and all that it imports as one strict script in a scope of its own, each once, imports first."""
    done: set[str] = set()

    def parts(path: str) -> Iterator[str]:
        if path in done:
            return
        done.add(path)
        text = _read(path)
        for imported in _IMPORT.findall(text):
            yield from parts(normpath(join(dirname(path), imported)))
        yield _COMMENT.sub("", _EXPORT.sub("", _IMPORT.sub("", text)))

    return '(() => {\n"use strict";\n' + "\n".join(parts(entry)) + "})();\n"


def policy_of(html: str) -> str:
    """Return the policy under which a page's own scripts and styles run, and nothing else (serving.md B 28).

    Trusted Types besides: only DOMPurify may turn a text into HTML.
    """
    scripts = " ".join(_digest(text) for text in _INLINE_SCRIPT.findall(html))
    styles = " ".join(_digest(text) for text in _INLINE_STYLE.findall(html))
    return (
        f"default-src 'none'; script-src 'self' {scripts}; style-src 'self' {styles}; connect-src 'self'; "
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
        return Response(page.body, media_type="text/html", headers=headers)
    return Response(page.packed, media_type="text/html", headers={**headers, "content-encoding": "gzip"})


def _read(path: str) -> str:
    return (files("nano_inference") / "web" / normpath(path)).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
