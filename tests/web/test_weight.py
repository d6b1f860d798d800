"""How heavy the page is (checklist 30): its size, and long answers and histories without work that grows with them."""

from __future__ import annotations

import gzip

from nano_inference.server.pages import bundled, load_page

MAX_PACKED = 80_000


def test_the_pages_are_small_and_whole() -> None:
    for name in ("chat", "dashboard"):
        page = load_page(name)
        assert len(page.packed) <= MAX_PACKED and gzip.decompress(page.packed) == page.body
        html = page.body.decode()
        assert not [line for line in html.splitlines() if line.startswith(("import ", "export "))]
        assert "<script src" not in html and 'rel="stylesheet"' not in html and "sourceMappingURL" not in html
        assert bundled(f"{name}/page.html") == html
