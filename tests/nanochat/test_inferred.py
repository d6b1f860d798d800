"""Inference of a nanochat checkpoint's generation and constants from names and shapes of its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import pytest

from nano_inference.loading.fields import Fields
from nano_inference.nanochat.checkpoint import Inferred, infer, parse_overrides
from nano_inference.types import BadRequest, ModelError
from tests.nanochat.tiny import GENERATIONS, model_config, state_dict

Shapes = dict[str, tuple[int, ...]]
MARCH = {"adam_beta1": 0.8, "eval_tokens": 41_943_040}
"""Settings of a base run of 2026-03-04 to 09."""
EARLIER = {"adam_beta1": 0.8, "eval_tokens": 20_971_520}


def shapes_of(generation: str, **sizes: Any) -> Shapes:
    return {name: tuple(w.shape) for name, w in state_dict(generation, model_config(generation, **sizes)).items()}


def inferred(
    shapes: Mapping[str, tuple[int, ...]],
    config: Mapping[str, Any],
    *overrides: str,
    user_config: Mapping[str, Any] | None = None,
    zeros: tuple[str, ...] = (),
) -> Inferred:
    return infer(
        "model.pt",
        shapes,
        Fields("model.pt: model_config", config),
        user_config=EARLIER if user_config is None else user_config,
        is_zero=lambda name: name in zeros,
        overrides=parse_overrides(overrides),
    )


def of(generation: str, *overrides: str, **sizes: Any) -> Inferred:
    user_config = MARCH if generation == "G2s" else EARLIER
    return inferred(shapes_of(generation), model_config(generation, **sizes), *overrides, user_config=user_config)


def refusal(
    shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any], *overrides: str, zeros: tuple[str, ...] = ()
) -> str:
    """Return the one-line error."""
    with pytest.raises(ModelError) as caught:
        inferred(shapes, config, *overrides, zeros=zeros)
    line = str(caught.value)
    assert line.startswith("model.pt")
    assert "\n" not in line
    assert len(line) < 600
    return line


# ---- the table ------------------------------------------------------------------------------------------------------

TABLE = {
    "G0": (10_000, 1.0, 15, 2),
    "G1": (10_000, 1.0, 15, 2),
    "G2": (10_000, 1.0, 15, 2),
    "G2e": (10_000, 1.0, 15, 2),
    "G2s": (10_000, 1.0, 20, 2),
    "G3": (100_000, 1.15, 15, 3),
    "G4": (100_000, 1.2, 15, 3),
}
"""rope base, scale of q and k, soft cap, scale of the value gates."""


ROPE_DTYPES = dict.fromkeys(("G0", "G1", "G2", "G2e"), "bfloat16") | dict.fromkeys(("G2s", "G3", "G4"), "float32")
"""Upstream rounded cos and sin until its commit 1076f97 of 2026-03-04."""


@pytest.mark.parametrize("generation", GENERATIONS)
def test_generation_is_recognised_with_its_constants(generation: str) -> None:
    found = of(generation)
    constants = found.constants
    assert constants.rope_dtype == ROPE_DTYPES[generation]
    assert constants.decode_window == "short"
    assert constants.generation == generation
    assert (constants.rope_base, constants.qk_scale, constants.softcap, constants.gate_scale) == TABLE[generation]
    assert constants.norm_eps == pytest.approx(2**-23, rel=1e-7)
    assert constants.sequence_len == 256
    assert constants.window_pattern == ("" if generation == "G0" else "SSSL")
    assert [line for line in found.warnings if "softcap=20" not in line] == []
    assert bool(found.warnings) == (found.constants.generation == "G2")


WINDOWS = {
    2048: (1024, 768, 512),
    256: (128, 128, 128),
    513: (256, 256, 256),
    1000: (500, 384, 256),
    4096: (2048, 1408, 1024),
}
"""Trained length: short windows of G1 to G2s, of G3, of G4."""


@pytest.mark.parametrize("sequence_len", WINDOWS)
def test_short_windows_depend_on_the_trained_length(sequence_len: int) -> None:
    half, third, quarter = WINDOWS[sequence_len]
    wanted = dict.fromkeys(("G1", "G2", "G2e", "G2s"), half) | {"G3": third, "G4": quarter}
    for generation, window in wanted.items():
        assert of(generation, sequence_len=sequence_len).constants.short_window == window, generation
        by_hand = of(generation, f"sequence_len={sequence_len}").constants
        assert (by_hand.sequence_len, by_hand.short_window) == (sequence_len, window)


# ---- constants that weights do not determine ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hints", "softcap", "warns"),
    [
        (MARCH, 20.0, False),
        (EARLIER, 15.0, True),
        ({}, 15.0, True),
        ({"adam_beta1": 0.8}, 15.0, True),
        ({"adam_beta1": 0.8, "eval_tokens": "41943040"}, 15.0, True),
    ],
)
def test_softcap_with_32_column_gates(hints: dict[str, Any], softcap: float, warns: bool) -> None:
    found = inferred(shapes_of("G2"), model_config("G2"), user_config=hints)
    assert found.constants.softcap == softcap
    assert found.constants.generation == ("G2s" if softcap == 20 else "G2")
    assert [("softcap=20" in line and "15" in line) for line in found.warnings] == ([True] if warns else [])


@pytest.mark.parametrize("generation", GENERATIONS[1:])
def test_missing_window_pattern_is_l_with_a_warning(generation: str) -> None:
    for missing in ({}, {"window_pattern": None}):
        config = {name: value for name, value in model_config(generation).items() if name != "window_pattern"}
        found = inferred(shapes_of(generation), config | missing)
        assert found.constants.window_pattern == "L"
        assert [line for line in found.warnings if "window_pattern=SSSL" in line and " L " in line]
        assert "missing" in found.reasons["window_pattern"]
        by_hand = inferred(shapes_of(generation), config | missing, "window_pattern=SSSL")
        assert by_hand.constants.window_pattern == "SSSL"
        assert by_hand.reasons["window_pattern"] == "set by hand"


@pytest.mark.parametrize("pattern", ["", "SX", 5, "S\n", "X" * 10_000])
def test_invalid_patterns_are_rejected(pattern: object) -> None:
    assert "window_pattern must be" in refusal(shapes_of("G1"), model_config("G1", window_pattern=pattern))


# ---- rejected weights -----------------------------------------------------------------------------------------------


def test_unknown_weights_are_listed() -> None:
    new = {f"transformer.h.{i}.attn.dyt.weight": (3,) for i in range(7)}
    line = refusal(shapes_of("G4") | new | {"loop_gate": (1,)}, model_config("G4"))
    assert "weights of no known nanochat generation" in line
    assert "'loop_gate', 'transformer.h.0.attn.dyt.weight'" in line
    assert line.endswith("and 3 more")
    for name in (
        "transformer.wpe.weight",
        "transformer.h.0.attn.c_q.bias",
        "transformer.h.x.attn.c_q.weight",
        "x.transformer.h.0.attn.c_q.weight",
        "transformer.h.0.mlp.c_fc.weight.scale",
        "cos",
        "",
        "bell\x07" * 1000,
    ):
        assert "no known nanochat generation" in refusal(shapes_of("G0") | {name: (1,)}, model_config("G0"))


# ---- overrides ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("sequence_len", "1000", 1000),
        ("rope_base", "5e5", 500_000.0),
        ("qk_scale", "1.3", 1.3),
        ("softcap", "20", 20.0),
        ("gate_scale", "2", 2.0),
        ("window_pattern", "sl", "SL"),
        ("window_pattern", "", ""),
        ("short_window", "77", 77),
        ("norm_eps", "1e-6", 1e-6),
        ("rope_dtype", "bfloat16", "bfloat16"),
        ("decode_window", "full", "full"),
    ],
)
def test_each_constant_can_be_overridden(name: str, text: str, value: object) -> None:
    plain, found = of("G4"), of("G4", f"{name}={text}")
    assert getattr(found.constants, name) == value
    assert found.reasons[name] == "set by hand"
    changed = {key for key, old in asdict(plain.constants).items() if getattr(found.constants, key) != old}
    assert changed == ({name, "short_window"} if name == "sequence_len" else {name})
    follows = {"short_window", "decode_window"} if text == "" else set()
    assert {key for key, why in found.reasons.items() if why != plain.reasons[key]} == {name} | follows


@pytest.mark.parametrize("generation", GENERATIONS)
def test_generation_override_sets_its_constants(generation: str) -> None:
    for file in ("G0", "G4"):
        found = of(file, f"generation={generation}", sequence_len=2048)
        constants = found.constants
        assert constants.generation == generation
        assert (constants.rope_base, constants.qk_scale, constants.softcap, constants.gate_scale) == TABLE[generation]
        assert constants.rope_dtype == ROPE_DTYPES[generation]
        assert constants.short_window == {"G3": 768, "G4": 512}.get(generation, 1024)
        assert found.reasons["generation"] == "set by hand"


@pytest.mark.parametrize(
    "text", ["softcap", "", "=20", "cap=20", "Softcap=20", " softcap=20", "softcap =20", "x" * 9999]
)
def test_unknown_override_names_are_rejected(text: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse_overrides((text,))
    assert "softcap, gate_scale" in str(caught.value)
    assert len(str(caught.value)) < 400


BAD_VALUES = (
    *(f"{name}={value}" for name in ("softcap", "rope_base", "qk_scale", "gate_scale", "norm_eps")
      for value in ("0", "nan", "1e400", "20,5", "1e13")),
    *(f"{name}={value}" for name in ("sequence_len", "short_window")
      for value in ("0", "2.5", "9999999999", "٣", "²")),
    *(f"generation={value}" for value in ("", "g4")),
    *(f"window_pattern={value}" for value in ("SSXL", "S,L")),
    *(f"rope_dtype={value}" for value in ("float16", "BFLOAT16")),
    *(f"decode_window={value}" for value in ("long", "FULL")),
)  # fmt: skip


@pytest.mark.parametrize("text", BAD_VALUES)
def test_invalid_override_values_are_rejected(text: str) -> None:
    with pytest.raises(BadRequest) as caught:
        of("G4", text)
    line = str(caught.value)
    assert text.partition("=")[0] in line
    assert "\n" not in line
    assert len(line) < 400
