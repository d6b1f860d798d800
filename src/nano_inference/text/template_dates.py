"""Today's date as variables of a chat template, with the names and formats of llama.cpp's server."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime


def dates() -> Mapping[str, str]:
    """Return `date_string`, such as 05 Jan 2026, and `datetime`, such as Jan 05 2026, in local time."""
    now = datetime.now()
    return {"date_string": now.strftime("%d %b %Y"), "datetime": now.strftime("%b %d %Y")}
