"""Multimodal models of Hugging Face, of which the text part is used: `…ForConditionalGeneration`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nano_inference.loading.fields import Fields
from nano_inference.types import ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapper:
    """A multimodal architecture around the text model that `text_config` describes, and defaults of its fields."""

    model_type: str  # the name in the field `model_type`
    text: str  # the text part's `model_type` if the file omits it
    tied: bool  # default of `tie_word_embeddings`, which the outer object has
    media: Mapping[str, int]  # fields of tokens that stand for images and videos


WRAPPERS: Mapping[str, Wrapper] = {
    "Gemma3ForConditionalGeneration": Wrapper(
        model_type="gemma3",
        text="gemma3_text",
        tied=True,
        media={"image_token_index": 262144, "boi_token_index": 255999, "eoi_token_index": 256000},
    ),
    "Mistral3ForConditionalGeneration": Wrapper(
        model_type="mistral3", text="mistral", tied=True, media={"image_token_index": 10}
    ),
    "Qwen3_5ForConditionalGeneration": Wrapper(
        model_type="qwen3_5",
        text="qwen3_5_text",
        tied=False,
        media={
            "image_token_id": 248056,
            "video_token_id": 248057,
            "vision_start_token_id": 248053,
            "vision_end_token_id": 248054,
        },
    ),
}


def wrapper_of(config: Fields) -> str | None:
    """Return the name of a multimodal architecture, by `architectures` or else `model_type`; None for others."""
    names = config.sequence("architectures") or ()
    name = names[0] if names else None
    if name is None:
        model_type = config.text("model_type", "")
        return next((name for name, wrapper in WRAPPERS.items() if wrapper.model_type == model_type), None)
    return name if isinstance(name, str) and name in WRAPPERS else None


def text_fields(config: Fields, wrapper: Wrapper) -> Fields:
    """Return the text part's fields, with those of the outer object that count for it."""
    text = config.within("text_config")
    if not text.values:
        raise ModelError(f"{config.origin}: text_config is missing")
    ends: list[object] = []
    for fields in (config, text):
        found = fields.get("eos_token_id")
        ends += found if isinstance(found, list) else [] if found is None else [found]
    outer = {
        "architectures": [],
        "model_type": text.text("model_type", wrapper.text),
        "tie_word_embeddings": config.flag("tie_word_embeddings", wrapper.tied),
        **({"eos_token_id": ends} if ends else {}),
        **{name: config.get(name) for name in ("bos_token_id",) if config.get(name) is not None},
    }
    return Fields(text.origin, {**text.values, **outer})


def media_tokens(config: Fields, wrapper: Wrapper, vocab_size: int) -> tuple[tuple[str, int], ...]:
    """Return (field, token) of the tokens that stand for images and videos, and of those around them."""
    found: list[tuple[str, int]] = []
    for name, default in wrapper.media.items():
        other = name.replace("_index", "_id")  # Transformers knows both names
        field = other if name not in config.values and other in config.values else name
        token = config.integer(field, default, low=0)
        if token < vocab_size:
            found.append((field, token))
    return tuple(found)
