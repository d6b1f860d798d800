"""Write the tables of docs/models.md from the registries: which models are supported, which are refused and why.

    python scripts/models.py [--check]

`--check` writes nothing and fails if the page differs.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nano_inference.loading.fields import Fields
from nano_inference.loading.gguf import RULES
from nano_inference.loading.hf_config import known_architectures, model_config
from nano_inference.loading.wrappers import WRAPPERS
from nano_inference.types import ModelError

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
START, END = "<!-- scripts/models.py -->\n", "<!-- end -->\n"
SHAPE = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
REFUSED: Mapping[str, dict[str, Any]] = {
    "experts": {"architectures": ["Qwen3NextForCausalLM"], **SHAPE},
    "other multimodal models": {"architectures": ["LlavaForConditionalGeneration"]},
    "GPTQ, AWQ, FP8": {"architectures": ["LlamaForCausalLM"], "quantization_config": {"quant_method": "fp8"}},
}
"""Configurations that the loader refuses, by their names on the page."""


def supported() -> list[str]:
    """Return a row for each family: its architectures, GGUF's names of them, and multimodal models around them."""
    of_family: dict[str, list[str]] = {}
    for name, (model_type, family) in known_architectures().items():
        ggufs = [f"`{key}`" for key, rules in RULES.items() if rules.name == name]
        wrappers = [f"in `{wrapper}`" for wrapper, about in WRAPPERS.items() if about.text == model_type]
        more = ", ".join((*ggufs, *wrappers))
        of_family.setdefault(family, []).append(f"`{name}`" + (f" ({more})" if more else ""))
    rows = [f"| `{family}` | {', '.join(names)} |" for family, names in of_family.items()]
    return ["| family | architectures (in GGUF files; in multimodal models) |", "|---|---|", *rows]


def refused() -> list[str]:
    """Return the rows of what is refused, with the message."""
    rows = ["| refused | with the message |", "|---|---|"]
    for title, config in REFUSED.items():
        try:
            model_config(Fields("config.json", config))
        except ModelError as error:
            text = re.sub(r"; known: .*", "; known: …", str(error)).removeprefix("config.json: ")
            rows.append(f"| {title} | {text} |")
        else:
            raise AssertionError(f"{title}: is supported")
    return rows


def page() -> str:
    """Return the page with both tables."""
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(START)
    _, after = rest.split(END)
    return before + START + "\n".join([*supported(), "", *refused(), ""]) + END + after


def main(arguments: list[str]) -> int:
    found = page()
    if arguments != ["--check"]:
        PAGE.write_text(found, encoding="utf-8")
    return int(PAGE.read_text(encoding="utf-8") != found)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
