"""Merges the Prometheus texts of several replicas into one. Pure.

Each sample gets the replica's index as its label `engine`, as vLLM labels the engines of one server: dashboards
that sum over engines work unchanged. Values are not summed here: a sum of counters falls when a replica restarts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_SAMPLE = re.compile(r"(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})?(?P<rest> .*)")
_ENGINE = re.compile(r'(^|,)engine="[^"]*"')


def merge(texts: Mapping[int, str]) -> str:
    """Return the samples of all replicas, one group per family with the first one's comments."""
    comments: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for index, text in texts.items():
        family, seen = "", set(comments)
        for line in text.splitlines():
            if line.startswith("#"):
                family = [*line.split(" ", 3), "", "", ""][2]
                if family not in seen:
                    comments.setdefault(family, []).append(line)
            elif line.strip():
                samples.setdefault(family, []).append(labelled(line, index))
    lines = [line for family in samples for line in (*comments.get(family, ()), *samples[family])]
    return "".join(f"{line}\n" for line in lines)


def labelled(line: str, index: int) -> str:
    """Return a sample's line with the label `engine` set to `index`."""
    match = _SAMPLE.fullmatch(line)
    if match is None:
        return line
    label = f'engine="{index}"'
    labels = match["labels"] or ""
    if _ENGINE.search(labels):
        labels = _ENGINE.sub(lambda found: f"{found[1]}{label}", labels, count=1)
    else:
        labels = f"{labels},{label}" if labels else label
    return f"{match['name']}{{{labels}}}{match['rest']}"
