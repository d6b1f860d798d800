"""Sampling defaults of chats: which source wins, and that every model of the catalog has valid ones."""

from __future__ import annotations

from typing import Any

import pytest

from nano_inference import SamplingParams
from nano_inference.loading.catalog import WHEELS, catalog_sampling, installed_builtins
from nano_inference.text.generation_config import CHAT_FIELDS, CHAT_MAX_TOKENS, chat_defaults

OWN = {"temperature": 0.6, "top_p": 0.9}
MEASURED = {"temperature": 0.2, "max_tokens": 99}
PLAIN: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "max_tokens": CHAT_MAX_TOKENS,
}


@pytest.mark.parametrize(
    ("generation", "catalog", "wanted", "source"),
    [
        (OWN, MEASURED, {**OWN, "max_tokens": 99}, "the model's generation_config.json"),
        ({}, MEASURED, MEASURED, "measured for this model"),
        ({}, {}, {"temperature": 0.7, "top_p": 0.95, "min_p": 0.05}, "default for chats"),
        ({"temperature": 0}, {}, {"temperature": 0}, "the model's generation_config.json"),
        (
            {"repetition_penalty": 1.1},
            {},
            {"temperature": 0.7, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.1},
            "default for chats",
        ),
        (
            {},
            {"max_tokens": 7},
            {"temperature": 0.7, "top_p": 0.95, "min_p": 0.05, "max_tokens": 7},
            "default for chats",
        ),
    ],
)
def test_the_first_source_that_names_temperature_or_truncation_gives_both(
    generation: dict[str, Any], catalog: dict[str, Any], wanted: dict[str, Any], source: str
) -> None:
    found = chat_defaults(generation, catalog)
    assert (dict(found.sampling), found.source) == ({**PLAIN, **wanted}, source)


@pytest.mark.parametrize("name", [model.name for model in (*installed_builtins(), *WHEELS)])
def test_the_catalogs_models_have_measured_defaults(name: str) -> None:
    found = chat_defaults({}, catalog_sampling(name))
    assert found.source == "measured for this model" and set(found.sampling) == set(CHAT_FIELDS)
    SamplingParams(**found.sampling)
