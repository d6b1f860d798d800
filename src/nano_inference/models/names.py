"""Names of weights: which of a checkpoint's or a trainer's tensors a model has, and under which name. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_FREQUENCIES = "rotary_emb.inv_freq"  # in old checkpoints; they follow from the configuration


@dataclass(frozen=True, slots=True, kw_only=True)
class TiledHeads:
    """A program's order of value heads: the first of each key head, then the second of each (llama.cpp's Qwen3.5)."""

    num_k_heads: int
    num_v_heads: int
    places: tuple[tuple[str, int, int], ...]  # (end of a weight's name, axis of its heads, where they start)

    def place_of(self, name: str) -> tuple[int, int] | None:
        """Return the axis of a weight's value heads and where they start; None if it has none."""
        return next(((axis, start) for end, axis, start in self.places if name.endswith(end)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class NameRules:
    """How names in files and updates become those of a program."""

    prefixes: tuple[tuple[str, str], ...] = ()  # (prefix of a file or trainer, the program's)
    ignored: tuple[str, ...] = ()  # prefixes of tensors that the program does not compute with
    tiled: TiledHeads | None = None  # updates have another order of heads; None: the program's

    def own(self, name: str) -> str | None:
        """Return the program's name of a tensor; None if it is ignored."""
        if self.ignored_as(name) is not None:
            return None
        for given, own in self.prefixes:
            if name.startswith(given):
                return own + name.removeprefix(given)
        return name

    def ignored_as(self, name: str) -> str | None:
        """Return the rule by which a tensor is ignored; None if it is not."""
        if name.endswith(_FREQUENCIES):
            return _FREQUENCIES
        return next((prefix for prefix in self.ignored if name.startswith(prefix)), None)


PLAIN_NAMES = NameRules()
"""Every name is the program's."""
TEXT_NAMES = NameRules(
    prefixes=(
        ("model.language_model.", "model."),
        ("language_model.model.", "model."),
        ("language_model.lm_head.", "lm_head."),
    ),
    ignored=(
        *("mtp.", "visual.", "model.visual.", "vision_tower.", "model.vision_tower."),
        *("multi_modal_projector.", "model.multi_modal_projector."),
    ),
)
"""The text part of a multimodal model, in Transformers' files and in its memory; its heads for drafts are ignored."""


class WeightShapes(Mapping[str, tuple[int, ...]]):
    """The shapes of a model's weights: iterates over the program's names, looks up every name that the rules know."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], names: NameRules = PLAIN_NAMES) -> None:
        self._shapes = dict(shapes)
        self.names = names

    def __getitem__(self, name: str) -> tuple[int, ...]:
        own = self.names.own(name)
        if own is None:
            raise KeyError(name)
        return self._shapes[own]

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)

    def fault(self, name: str, shape: tuple[int, ...]) -> str | None:
        """Return why the model cannot take a tensor of an update; None if it can, or ignores it."""
        if self.names.own(name) is None:
            return None
        if name not in self:
            return f"{name[:200]}: the model has no such tensor"
        return None if shape == self[name] else f"{name}: has the shape {shape}, the model {self[name]}"
