"""The site builds without warnings, has every page, a search and the reference, and loads nothing from other hosts."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import BrowserContext

from tests.docs.pages import DOCS, ROOT, blocks_of, name_of

pytestmark = pytest.mark.slow
CONFIG = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]
CUT_OFF = """() => [...document.querySelectorAll("pre, pre > code")]
    .filter(one => one.scrollWidth > one.clientWidth + 1)
    .map(one => one.innerText.slice(0, 80))"""
"""The beginnings of code blocks that are wider than their place."""
WIDTHS = (390, 1280)
"""The widest last: there the page shows its search field."""


@pytest.fixture(scope="module")
def own_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Host and port of a server of the site, built from a copy of its sources."""
    place = tmp_path_factory.mktemp("site")
    for folder in ("docs", "src"):
        shutil.copytree(ROOT / folder, place / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "zensical.toml", place)
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0 and "warning" not in (done.stdout + done.stderr).lower(), done.stdout + done.stderr

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(place / "site")))
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def pages_in(navigation: list[Any]) -> Iterator[str]:
    """Yield the files of a navigation, in order."""
    for entry in navigation:
        for target in entry.values():
            yield from pages_in(target) if isinstance(target, list) else (target,)


def test_every_page_is_in_the_navigation_once() -> None:
    assert sorted(f"docs/{page}" for page in pages_in(CONFIG["nav"])) == sorted(map(name_of, DOCS))


def test_browser_shows_every_page_and_asks_no_other_host(own_host: str, context: BrowserContext) -> None:
    """Each page is opened once: opening takes longer than everything that is checked."""
    asked: list[str] = []
    refused: list[str] = []
    context.on("request", lambda one: asked.append(one.url))
    context.on("response", lambda one: refused.append(one.url) if one.status >= 400 else None)
    page = context.new_page()
    for path in DOCS:
        page.goto(f"http://{own_host}/{path.relative_to(ROOT / 'docs').with_suffix('.html').as_posix()}")
        title = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        assert title.split("`")[0].strip() in re.sub(r"\s+", " ", page.locator("h1").inner_text())
        if path.name == "reference.md":
            assert page.locator("h4").count() > 100, "methods and fields"
            continue
        assert page.locator("pre > code").count() == len(blocks_of(path)), path
        for width in WIDTHS if blocks_of(path) else ():
            page.set_viewport_size({"width": width, "height": 800})
            assert page.evaluate(CUT_OFF) == [], (path, width)
    page.locator("button.md-search__button").click()
    page.locator("dialog[aria-label='Search'] input").fill("processed")
    page.locator("a[href*='rl.html?h=processed']").first.wait_for(state="attached")
    page.wait_for_load_state("networkidle")
    assert len(asked) > len(DOCS) and not refused
    assert {urlsplit(url).netloc for url in asked if not url.startswith(("data:", "blob:"))} == {own_host}
