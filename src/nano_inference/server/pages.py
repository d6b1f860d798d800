"""The web pages: each is bundled into one self-contained file from the modules in `web/`.

A page's HTML refers to style sheets, scripts and modules as on a static server; the bundler inlines them. Modules are
concatenated in import order without `import` and `export`, so their top-level names share one scope (tests/web checks
that these are unique). A script marked `data-later` stays a separate file (`LATER`) that the page loads on demand. The
page's Content-Security-Policy lists the digest of each script and style (CSP level 3), so that no other can run.
"""

from __future__ import annotations

import gzip
import re
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
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
"""A comment on separate lines in this project's sources; libraries keep theirs, which contain their licences."""
_REMARK = re.compile(r"(?<=[;,{}()\]]) // [^\n]*$", re.MULTILINE)
_INDENT = re.compile(r"^[ ]+", re.MULTILINE)
_INLINE_SCRIPT = re.compile(r"<script>(.*?)</script>", re.DOTALL)
_INTEGRITY = re.compile(r'<script src="[^"]+" integrity="([^"]+)">')
_INLINE_STYLE = re.compile(r"<style>(.*?)</style>", re.DOTALL)

LATER: Mapping[str, tuple[str, str]] = {"formulas.js": ("vendor/temml.js", "formulas/main.js")}
"""Files that a page loads on demand: path -> (library, module that uses it)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    body: bytes  # UTF-8
    packed: bytes  # `body` compressed with gzip
    policy: str  # Content-Security-Policy
    tag: str  # ETag
    media_type: str


@cache
def load_page(name: str) -> Page:
    """Return the bundled page `web/NAME/page.html`, or the file `NAME` of `LATER`."""
    if name in LATER:
        return _page(_later(name), "default-src 'none'", "text/javascript")
    html = bundled(f"{name}/page.html")
    return _page(html, policy_of(html), "text/html")


def _page(text: str, policy: str, media_type: str) -> Page:
    body = text.encode()
    tag = f'"{sha256(body).hexdigest()[:32]}"'
    return Page(body=body, packed=gzip.compress(body, 9, mtime=0), policy=policy, tag=tag, media_type=media_type)


def bundled(path: str) -> str:
    """Return the HTML of a file below `web/` with its styles, scripts and modules inlined."""
    here = dirname(path)

    def style(found: re.Match[str]) -> str:
        return f"<style>\n{_bare(_read(join(here, found[1])))}</style>"

    def script(found: re.Match[str]) -> str:
        source = normpath(join(here, found[2]))
        text = joined_modules(source) if found[1] else _read(source)
        assert "</script" not in text.lower(), f"{source} contains </script, which would end its element"
        return f"<script>\n{text}</script>"

    def later(found: re.Match[str]) -> str:
        return f'<script src="{found[1]}" integrity="{_hash(_later(found[1]))}"></script>'

    return _LATER_SCRIPT.sub(later, _SCRIPT.sub(script, _STYLE.sub(style, _read(path))))


def _later(name: str) -> str:
    library, module = LATER[name]
    return _read(library) + joined_modules(module)


def joined_modules(entry: str) -> str:
    """Return a module and its imports as one strict script in a function scope, each once, imports first."""
    parts = (_bare(_EXPORT.sub("", _IMPORT.sub("", _read(path)))) for path in module_paths(entry))
    return '(() => {\n"use strict";\n' + "\n".join(parts) + "})();\n"


def module_paths(entry: str) -> list[str]:
    """Return the paths of a module and its transitive imports, each once, imports first."""
    paths: list[str] = []

    def visit(path: str) -> None:
        for imported in _IMPORT.findall(_read(path)):
            visit(normpath(join(dirname(path), imported)))
        if path not in paths:
            paths.append(path)

    visit(entry)
    return paths


def policy_of(html: str) -> str:
    """Return the Content-Security-Policy that allows only a page's own scripts and styles.

    A file loaded on demand is listed by its integrity digest, since 'self' would allow every script of this server.
    Trusted Types: only DOMPurify may turn text into HTML.
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
    """Return the response with a page, compressed if the browser accepts gzip; 304 if it has the page's ETag."""
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
    """Return a source without comments and indentation; tests/web checks that its strings do not depend on them."""
    return _INDENT.sub("", _REMARK.sub("", _COMMENT.sub("", text)))


def _read(path: str) -> str:
    return (files("nano_inference") / "server" / "web" / normpath(path)).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"
