"""The site builds without warnings, has every page in its navigation, and loads nothing from other hosts."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import BrowserContext

from tests.docs.pages import DOCS, ROOT, blocks_of

CONFIG = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]
FETCHING = {"src", "srcset", "poster", "data", "background", "action"}
"""Attributes whose address a browser asks for by itself; `href` is one on a `link`, not on an `a`."""


def built(place: Path, **changed: str) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Build a copy of the sources, some pages changed; return where the site is, and what the builder said."""
    shutil.copytree(ROOT / "docs", place / "docs")
    shutil.copy(ROOT / "zensical.toml", place)
    for name, text in changed.items():
        (place / "docs" / f"{name}.md").write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False, timeout=120)
    return place / "site", done


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    where, done = built(tmp_path_factory.mktemp("site"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "warning" not in (done.stdout + done.stderr).lower(), done.stderr
    return where


def pages_in(navigation: list[Any]) -> Iterator[str]:
    """Yield the files of a navigation, in order."""
    for entry in navigation:
        for target in entry.values():
            yield from pages_in(target) if isinstance(target, list) else (target,)


def asked_for(html: str) -> list[str]:
    """Return every address that a page asks for when it is opened."""
    found: list[str] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
            for name, value in attributes:
                if value and (name in FETCHING or (name == "href" and tag in ("link", "image", "use"))):
                    found.append(value)
                elif value and name == "style":
                    found.extend(styles_ask_for(value))

        def handle_data(self, data: str) -> None:
            if self.cdata_elem == "style":
                found.extend(styles_ask_for(data))

    Reader().feed(html)
    return found


def styles_ask_for(text: str) -> list[str]:
    """Return every address in a style sheet that is not in the sheet itself."""
    found = re.findall(r"""url\(\s*["']?([^"')]+)|@import\s+["']([^"']+)""", text)
    return [one for pair in found for one in pair if one and not one.startswith("data:")]


def is_elsewhere(address: str) -> bool:
    return bool(urlsplit(address).netloc)


def test_every_page_is_in_the_navigation_once() -> None:
    listed = list(pages_in(CONFIG["nav"]))
    assert sorted(listed) == sorted(path.relative_to(ROOT / "docs").as_posix() for path in DOCS)


def test_every_page_and_image_is_in_the_site(site: Path) -> None:
    for path in DOCS:
        html = (site / path.relative_to(ROOT / "docs").with_suffix(".html")).read_text(encoding="utf-8")
        title = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        assert title.split("`")[0].strip() in re.sub(r"<[^>]+>", "", html), path
    assert {one.name for one in (site / "images").iterdir()} >= {one.name for one in (ROOT / "docs/images").iterdir()}
    assert "getting-started" in (site / "search.json").read_text(encoding="utf-8"), "there is an index to search"


def test_a_warning_ends_the_build(tmp_path: Path) -> None:
    _, done = built(tmp_path, index="# One\n\nSee [nothing](nowhere.md) and [no place](rl.md#nowhere).\n")
    assert done.returncode != 0 and "page does not exist" in done.stderr and "anchor does not exist" in done.stderr


def test_pages_load_nothing_from_other_hosts(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    sheets = sorted(site.rglob("*.css"))
    assert len(pages) > len(DOCS) and sheets
    for page in pages:
        assert not [one for one in asked_for(page.read_text(encoding="utf-8")) if is_elsewhere(one)], page.name
    for sheet in sheets:
        assert not [one for one in styles_ask_for(sheet.read_text(encoding="utf-8")) if is_elsewhere(one)], sheet.name


def test_loaded_addresses_are_found() -> None:
    html = (
        '<a href="https://a.b"></a><link href="https://c.d/x.css"><script src="//e.f/g.js"></script><img src="h.png">'
    )
    html += "<style>@import 'https://i.j/k.css'; p { background: url(https://l.m/n.png) url(data:image/png,x) }</style>"
    html += '<p style="background: url(//o.p/q.png)">'
    hosts = {urlsplit(one).netloc for one in asked_for(html) if is_elsewhere(one)}
    assert hosts == {"c.d", "e.f", "i.j", "l.m", "o.p"}


class Quiet(SimpleHTTPRequestHandler):
    """Serves files and says nothing."""

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def own_host(site: Path) -> Iterator[str]:
    """Host and port of a server of the site."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def url_of(own_host: str, path: Path) -> str:
    """Return a page's address."""
    return f"http://{own_host}/{path.relative_to(ROOT / 'docs').with_suffix('.html').as_posix()}"


CUT_OFF = """() => [...document.querySelectorAll("pre, pre > code")]
    .filter(one => one.scrollWidth > one.clientWidth + 1)
    .map(one => one.innerText.slice(0, 80))"""
"""The beginnings of code blocks that are wider than their place."""


WIDTHS = (390, 800, 1280)
"""The widest last: there the page shows its search field."""


def test_browser_shows_whole_code_blocks_and_requests_no_other_host(own_host: str, context: BrowserContext) -> None:
    """Each page is opened once: opening takes longer than everything that is checked."""
    own = own_host
    asked: list[str] = []
    refused: list[str] = []
    context.on("request", lambda one: asked.append(one.url))
    context.on("response", lambda one: refused.append(one.url) if one.status >= 400 else None)
    page = context.new_page()
    for path in DOCS:
        page.goto(url_of(own, path))
        assert page.locator("h1").count() == 1, path
        blocks = page.locator("pre > code").count()
        assert blocks == len(blocks_of(path)), path
        for width in WIDTHS if blocks else ():
            page.set_viewport_size({"width": width, "height": 800})
            assert page.evaluate(CUT_OFF) == [], (path, width)
    page.locator("button.md-search__button").click()
    page.locator("dialog[aria-label='Search'] input").fill("processed")
    page.locator("a[href*='rl.html?h=processed']").first.wait_for(state="attached")
    page.wait_for_load_state("networkidle")
    assert len(asked) > len(DOCS) and not refused
    assert {urlsplit(url).netloc for url in asked if not url.startswith(("data:", "blob:"))} == {own}
