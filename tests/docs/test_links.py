"""Every relative link, anchor and image of README and docs exists."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from tests.cases import failures
from tests.docs.pages import DOCS, LINKING, ROOT, anchors_in, links_in


def broken_links(text: str, page: Path) -> list[str]:
    """Return the links of a page that lead nowhere."""
    return [link for link in links_in(text) if not is_external(link) and not leads(link, text, page)]


def is_external(link: str) -> bool:
    return urlsplit(link).scheme in ("http", "https", "mailto")


def leads(link: str, text: str, page: Path) -> bool:
    """Whether a link's file is there, and the anchor in it."""
    parts = urlsplit(link)
    target = page.parent / unquote(parts.path) if parts.path else page
    if parts.scheme or not target.resolve().is_relative_to(ROOT) or not (target == page or target.exists()):
        return False
    if not parts.fragment:
        return True
    aimed = text if target == page else target.read_text(encoding="utf-8")
    return target.suffix == ".md" and parts.fragment in anchors_in(aimed)


def test_link_targets_exist() -> None:
    def check(page: Path) -> None:
        assert broken_links(page.read_text(encoding="utf-8"), page) == []

    assert failures(check, zip(LINKING)) == []


def test_the_sites_pages_link_only_what_the_site_has() -> None:
    def check(page: Path) -> None:
        for link in links_in(page.read_text(encoding="utf-8")):
            parts = urlsplit(link)
            inside = (page.parent / unquote(parts.path)).resolve().is_relative_to(ROOT / "docs")
            assert is_external(link) or inside, f"{link}: name the file, do not link it: it is not part of the site"

    assert failures(check, zip(DOCS)) == []


def test_every_image_is_shown_somewhere() -> None:
    shown = {(page.parent / unquote(link)).resolve() for page in LINKING for link in links_in(page.read_text())}
    kept = {path.resolve() for path in (ROOT / "docs" / "images").iterdir()}
    assert kept <= shown, f"no page shows {sorted(path.name for path in kept - shown)}"


def test_broken_links_are_detected() -> None:
    page = ROOT / "docs" / "one.md"
    text = "# A title, it is\n[a](#a-title-it-is) [b](#b) [c](rl.md) [d](no.md) [e](rl.md#over-http) [f](rl.md#no)\n"
    text += "![g](images/curves.png) ![h](images/no.png) [i](https://x.y/z) [j](ftp://x.y) `[k](no.md)`\n"
    text += '[![l](images/no2.png)](rl.md) [m](rl.md "title")\n```text\n[n](no.md)\n```\n[o](../../out.md)\n'
    anchors, files = ["#b", "rl.md#no"], ["no.md", "images/no.png", "ftp://x.y", "images/no2.png", "../../out.md"]
    assert sorted(broken_links(text, page)) == sorted(anchors + files)
