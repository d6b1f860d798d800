"""Fetch the pinned libraries of the web pages from the npm registry and write them to `server/web/vendor/`.

Run it after a version below was raised: `python scripts/vendor.py`. It needs npm; nothing else does. The digests are
those of the registry's archives. What is part of the page itself is packed a second time, by terser: 1.2 kB of 80.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import NamedTuple

VENDOR = Path(__file__).parents[1] / "src" / "nano_inference" / "server" / "web" / "vendor"
_LANGUAGES = ("bash", "cpp", "diff", "go", "javascript", "json", "python", "rust", "sql", "xml", "yaml")
_TERSER = "terser@5.51.2"
_SOURCE_MAP = re.compile(r"\n?//# sourceMappingURL=\S+\s*$")
_FONT_FACE = re.compile(r"@font-face\s*\{[^}]*\}")
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_EXPORTS = re.compile(r"export\s*\{\s*(\w+) as default[^}]*\};?\s*$")


class Archive(NamedTuple):
    """One package of the registry."""

    name: str
    version: str
    sha256: str

    @property
    def file_name(self) -> str:
        """What `npm pack` calls it."""
        return f"{self.name.removeprefix('@').replace('/', '-')}-{self.version}.tgz"


MARKED = Archive("marked", "18.2.1", "d66c5213fc203466186060105b01f51896764ba64b3797d2620d02e28e34b8ca")
PURIFY = Archive("dompurify", "3.4.18", "8b86f79c6481fec23dd81d4de32179422668912ed033c0c47e786a6e70cb3379")
HIGHLIGHT = Archive(
    "@highlightjs/cdn-assets", "11.12.0", "b8a006d30f45afe783072569f3d69c5b60c0e7b9ca28cd474e12f2584e2a3bd9"
)

TEMML = Archive("temml", "0.13.5", "bca5b76dd26d1d6c81f8d817f6cc8bf0f0a1a7787512e281d5c22b986f8ae582")


def main() -> None:
    """Fetch, check and write everything."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        marked, purify, highlight, temml = (unpacked(one, folder) for one in (MARKED, PURIFY, HIGHLIGHT, TEMML))
        write("marked.js", packed((marked / "lib/marked.umd.js").read_text()), marked / "LICENSE")
        write("purify.js", packed((purify / "dist/purify.min.js").read_text()), purify / "LICENSE")
        write("highlight.js", packed(highlighter(highlight)), highlight / "LICENSE")
        write("temml.js", formula_renderer(temml), temml / "LICENSE")


def unpacked(archive: Archive, folder: Path) -> Path:
    """Fetch an archive, compare its digest, and return the directory of its files."""
    subprocess.run(["npm", "pack", "--silent", f"{archive.name}@{archive.version}"], cwd=folder, check=True)
    packed = folder / archive.file_name
    digest = hashlib.sha256(packed.read_bytes()).hexdigest()
    if digest != archive.sha256:
        raise SystemExit(f"{archive.name} {archive.version}: sha256 is {digest}, not {archive.sha256}")
    target = folder / packed.stem
    with tarfile.open(packed) as tar:
        tar.extractall(target, filter="data")
    return target / "package"


def packed(script: str) -> str:
    """Return a script packed again; comments that name a licence stay."""
    command = ["npm", "exec", "--yes", f"--package={_TERSER}", "--", "terser", "--ecma", "2020", "--mangle"]
    options = ["--compress", "passes=3,ecma=2020", "--comments", "/licen|copyright|\\(c\\)/i"]
    script = _SOURCE_MAP.sub("", script)
    return subprocess.run([*command, *options], input=script, check=True, capture_output=True, text=True).stdout


def highlighter(package: Path) -> str:
    """Return highlight.js with a few languages as one script that defines `hljs`."""
    core = (package / "es/core.min.js").read_text()
    found = _EXPORTS.search(core)
    if found is None:
        raise SystemExit("highlight.js: its core does not export as it used to")
    head = f"const hljs = (() => {{\n{core[: found.start()]}\nreturn {found[1]};\n}})();\n"
    return head + "\n".join((package / f"languages/{name}.min.js").read_text() for name in _LANGUAGES)


def formula_renderer(package: Path) -> str:
    """Return Temml with its rules of style as one script that defines `temml`.

    The rules are adopted as a constructed sheet, which the page's policy allows; the font they name is not shipped.
    """
    script = (package / "dist/temml.min.js").read_text().rstrip()
    rules = _COMMENT.sub("", _FONT_FACE.sub("", (package / "dist/Temml-Local.css").read_text()))
    rules = re.sub(r"\s+", " ", rules).strip()
    return (
        f"/*! Temml {TEMML.version}, MIT licence, https://temml.org */\n{script}\n"
        f"{{ const sheet = new CSSStyleSheet(); sheet.replaceSync({json.dumps(rules)}); "
        "document.adoptedStyleSheets.push(sheet); }"
    )


def write(name: str, text: str, licence: Path) -> None:
    """Write a library and its licence; a map of its source would be one more request."""
    VENDOR.mkdir(parents=True, exist_ok=True)
    (VENDOR / name).write_text(_SOURCE_MAP.sub("", text.rstrip()) + "\n")
    (VENDOR / f"{name.removesuffix('.js')}.LICENSE").write_text(licence.read_text())


if __name__ == "__main__":
    main()
