"""`models list`, `models pull` and `models rm`."""

from __future__ import annotations

import json
import sys

from rich.console import Console
from rich.table import Table

from nano_inference.cli.options import Common
from nano_inference.cli.place import cache_of
from nano_inference.cli.terminal import bar, note
from nano_inference.loading.catalog import files_of, list_models, pull, remove


def show_list(as_json: bool, common: Common) -> int:
    """Print the models in the caches."""
    entries = list_models(cache_of(common))
    if as_json:
        rows = [{"name": e.name, "path": str(e.path), "bytes": e.bytes, "source": e.source} for e in entries]
        print(json.dumps(rows))
        return 0
    if not entries:
        note(f"no models in {cache_of(common)}; `nano-inference models pull default` fetches one", common.quiet)
        return 0
    table = Table("name", "size", "source", "path", box=None)
    for entry in entries:
        table.add_row(entry.name, human_bytes(entry.bytes), entry.source, str(entry.path))
    print_table(table)
    return 0


def pull_model(name: str, common: Common) -> int:
    """Fetch a model; print its path, and on stderr its files."""
    with bar(f"fetching {name}", is_bytes=True, quiet=common.quiet) as progress:
        path = pull(name, cache_of(common), progress)
    files = files_of(path)
    for file in files:
        checked = f"sha256 {file.sha256}" if file.sha256 else "the source gives no sha256"
        note(f"  {file.name}: {file.bytes:,} bytes, {checked}", common.quiet)
    total = sum(file.bytes for file in files)
    note(f"{name}: {total:,} bytes ({human_bytes(total)}) in {path}", common.quiet)
    print(path)
    return 0


def remove_model(name: str, common: Common) -> int:
    """Delete a model and print the freed bytes."""
    freed = remove(name, cache_of(common))
    note(f"removed {name}: {human_bytes(freed)} freed", common.quiet)
    return 0


def human_bytes(count: int) -> str:
    """Format a size in bytes, such as "98.4 MB"."""
    size, units = float(count), ("B", "kB", "MB", "GB", "TB")
    for unit in units[:-1]:
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} {units[-1]}"


def print_table(table: Table) -> None:
    """Print a table to stdout; in a pipe, rows are not wrapped at 80 columns."""
    console = Console() if sys.stdout.isatty() else Console(width=200)
    console.print(table)
