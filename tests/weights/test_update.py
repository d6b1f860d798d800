"""Weight updates: accepted and rejected inputs; a rejected update leaves the weights unchanged."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nano_inference import BadRequest, InferenceEngine, SamplingParams, UpdateBusy, WeightError, weights_checksum
from nano_inference.build import EngineParts
from nano_inference.weights.sync import WeightSyncManager
from tests.models.families import FAMILIES, gap, others_nightly
from tests.weights.pairs import InPieces, OpenEngine, Pair, make_pair

PROMPT = [5, 9, 30, 2, 44, 17, 80, 3]
GREEDY = SamplingParams(temperature=0, max_tokens=12)
Named = dict[str, torch.Tensor]


def matches(engine: InferenceEngine, model: torch.nn.Module) -> bool:
    """Return True if the engine's log-probabilities match those of Transformers for a model."""
    engine.flush_cache()
    sample = engine.generate([PROMPT], GREEDY)[0]
    return gap(model, [*PROMPT, *sample.completion_tokens], list(sample.logprobs)) <= 1e-4  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("family", others_nightly(FAMILIES))
def test_updated_engine_matches_the_trainers_model(family: str, tmp_path: Path, open_engine: OpenEngine) -> None:
    pair = make_pair(family, tmp_path)
    engine = open_engine(pair)
    before = engine.weights_checksum()
    assert matches(engine, pair.old) and not matches(engine, pair.new)
    assert engine.update_weights(pair.named(), version="step-1") == 1
    assert engine.finish_update() == engine.get_weight_version() == 1
    assert engine.weight_info() == (1, "step-1", "idle")
    assert matches(engine, pair.new)
    assert engine.weights_checksum() == weights_checksum(pair.new.named_parameters()) != before
    assert engine.update_weights(pair.old.named_parameters(), blocking=True) == 2
    assert matches(engine, pair.old) and engine.weights_checksum() == before


def test_tied_head_is_optional_but_must_match_embedding(tied: Pair, open_engine: OpenEngine) -> None:
    engine = open_engine(tied)
    whole = tied.new.state_dict()
    assert "lm_head.weight" in whole and "lm_head.weight" not in tied.named()
    engine.update_weights(whole, blocking=True)
    assert matches(engine, tied.new)
    with_head_first = {"lm_head.weight": whole["lm_head.weight"]}
    with_head_first |= {name: tensor for name, tensor in whole.items() if name != "model.embed_tokens.weight"}
    engine.update_weights(tied.old.named_parameters(), blocking=True)
    engine.update_weights(with_head_first, blocking=True)
    assert matches(engine, tied.new)
    with pytest.raises(WeightError, match=r"lm_head\.weight: differs from model\.embed_tokens\.weight"):
        engine.update_weights({**whole, "lm_head.weight": whole["lm_head.weight"] + 1}, blocking=True)


def without(named: Named, name: str) -> Named:
    return {key: value for key, value in named.items() if key != name}


def spoiled(named: Named, value: float) -> Named:
    weight = named["model.layers.1.mlp.up_proj.weight"].clone()
    weight[3, 7] = value
    return {**named, "model.layers.1.mlp.up_proj.weight": weight}


Q = "model.layers.0.self_attn.q_proj.weight"
BROKEN: dict[str, tuple[Callable[[Named], object], str]] = {
    "shape": (lambda n: {**n, Q: n[Q][:-1]}, r"q_proj\.weight: the update has the shape"),
    "integers": (lambda n: {**n, Q: n[Q].to(torch.int8)}, "has the dtype int8; known"),
    "missing": (lambda n: without(n, Q), rf"lacks 1 tensors: {Q}"),
    "unknown": (lambda n: {**n, "model.layers.99.mlp.up_proj.weight": n[Q]}, r"layers\.99.*: the model has no such"),
    "twice": (lambda n: [*n.items(), (Q, n[Q])], rf"{Q}: occurs twice"),
    "nan": (lambda n: spoiled(n, float("nan")), r"up_proj\.weight: holds NaN or infinity"),
    "overflow": (lambda n: {**n, Q: torch.full_like(n[Q], 1e300, dtype=torch.float64)}, "holds NaN or infinity"),
    "meta": (lambda n: {**n, Q: n[Q].to("meta")}, "must be a dense tensor with values"),
    "sparse": (lambda n: {**n, Q: n[Q].to_sparse()}, "must be a dense tensor"),
    "array": (lambda n: {**n, Q: n[Q].numpy()}, "must be a tensor, got ndarray"),
    "number name": (lambda n: {**n, 3: n[Q]}, "name must be a string, got 3"),
    "not pairs": (lambda n: list(n), r"must be \(name, tensor\) pairs, got str"),
    "a tensor": (lambda n: n[Q], "must be a state dict"),
    "fails": (lambda n: failing(n), "the source of the weights failed: RuntimeError: the trainer died"),
}


def failing(named: Named) -> Iterator[tuple[str, torch.Tensor]]:
    yield next(iter(named.items()))
    raise RuntimeError("the trainer died")


@pytest.mark.parametrize(("case", "blocking"), [*((case, True) for case in BROKEN), ("shape", False), ("fails", False)])
def test_invalid_update_is_reported_and_leaves_the_weights_unchanged(
    case: str, blocking: bool, untied: Pair, open_engine: OpenEngine
) -> None:
    engine = open_engine(untied)
    before = engine.weights_checksum()
    make, message = BROKEN[case]
    request = engine.add_request(PROMPT, SamplingParams(max_tokens=6, seed=1))
    with pytest.raises(WeightError, match=message):
        engine.update_weights(make(untied.named()), blocking=blocking)  # type: ignore[arg-type]
        engine.finish_update()
    assert engine.weight_info() == (0, None, "idle")
    assert engine.weights_checksum() == before and matches(engine, untied.old)
    samples = []
    while engine.has_pending():
        samples += engine.step()
    assert [sample.request_id for sample in samples] == [request] or not samples  # `matches` ran it along
    engine.update_weights(untied.named(), blocking=True)
    assert matches(engine, untied.new)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda model: model, "got LlamaForCausalLM; pass its state_dict"),
        (lambda model: list(model.parameters()), "got Parameter"),
        (lambda model: model.state_dict().values(), "got Tensor"),
        (lambda model: "no/such/place", "no/such/place: no such directory"),
    ],
)
def test_update_from_something_else_is_refused_in_the_call(
    make: Callable[[Any], Any], message: str, untied: Pair, open_engine: OpenEngine
) -> None:
    engine = open_engine(untied)
    with pytest.raises(WeightError, match=message):
        engine.update_weights(make(untied.new), blocking=False)
    assert engine.weight_info() == (0, None, "idle")


def test_allow_nonfinite_accepts_nan(untied: Pair, open_engine: OpenEngine) -> None:
    engine = open_engine(untied)
    engine.update_weights(spoiled(untied.named(), float("nan")), blocking=True, allow_nonfinite=True)
    assert engine.get_weight_version() == 1


@pytest.mark.parametrize("kernels", ["off", "auto"])
def test_partial_update_keeps_other_weights(kernels: str, untied: Pair, open_engine: OpenEngine) -> None:
    """Includes weights that are stacked with others, and reused memory of replaced weights."""
    engine = open_engine(untied, kernels=kernels)
    mixed = type(untied.old)(untied.old.config).eval()
    mixed.load_state_dict({**untied.old.state_dict(), Q: untied.named()[Q]})
    for _ in range(3):
        engine.update_weights({Q: untied.named()[Q]}, blocking=True, partial=True)
        assert matches(engine, mixed) and engine.weights_checksum() == weights_checksum(mixed.named_parameters())
        engine.update_weights(untied.named(), blocking=True)
        engine.update_weights(dict(untied.old.named_parameters()), blocking=True)
    engine.update_weights({Q: untied.named()[Q]}, blocking=True, partial=True)
    assert matches(engine, mixed)
    with pytest.raises(WeightError, match="the update is empty"):
        engine.update_weights({}, blocking=True, partial=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_update_converts_dtypes(dtype: torch.dtype, untied: Pair, open_engine: OpenEngine) -> None:
    engine = open_engine(untied)
    sent = {name: tensor.to(dtype) for name, tensor in untied.named().items()}
    engine.update_weights(sent, blocking=True)
    assert engine.weights_checksum() == weights_checksum(sent.items(), torch.float32)


def test_checksum_is_verified_before_the_swap(untied: Pair, open_engine: OpenEngine) -> None:
    engine = open_engine(untied)
    right = weights_checksum(untied.new.named_parameters())
    with pytest.raises(WeightError, match=f"checksum: the update has {right}, 00 was expected"):
        engine.update_weights(untied.named(), blocking=True, checksum="00")
    assert engine.get_weight_version() == 0
    engine.update_weights(untied.named(), blocking=True, checksum=right)


class PausedSource:
    """A source that yields its first tensor and waits for `resume` before the others."""

    def __init__(self, named: Named) -> None:
        self.resume = threading.Event()
        self.named = named
        self.num_given = 0

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for item in self.named.items():
            yield item
            self.num_given += 1
            self.resume.wait(30)


def test_steps_run_during_staging_and_a_second_update_is_rejected(untied: Pair, open_engine: OpenEngine) -> None:
    engine = open_engine(untied)
    source = PausedSource(untied.named())
    engine.add_request(PROMPT, SamplingParams(max_tokens=30, seed=1, ignore_eos=True))
    engine.update_weights(source)
    for _ in range(10):
        assert engine.step() == [] and engine.weight_info().update == "staging"
    for blocking in (True, False):
        with pytest.raises(UpdateBusy, match="an update is staging"):
            engine.update_weights(untied.named(), blocking=blocking)
    with pytest.raises(TimeoutError):
        engine.finish_update(timeout=0)
    source.resume.set()
    assert engine.parts.weights is not None and engine.parts.weights.wait() == "staged"
    with pytest.raises(UpdateBusy, match="an update is staged"):
        engine.update_weights(untied.named())
    assert engine.get_weight_version() == 0
    sample = run_out(engine)
    assert engine.get_weight_version() == 1
    assert sample.token_versions == (0,) * 10 + (1,) * 20
    assert [span[:3] for span in sample.version_spans] == [(0, 0, 10), (1, 10, 30)]


def run_out(engine: InferenceEngine) -> object:
    samples = []
    while engine.has_pending():
        samples += engine.step()
    return samples[0]


def test_update_fails_after_its_timeout(untied: Pair, open_engine: OpenEngine) -> None:
    engine = open_engine(untied)
    source = PausedSource(untied.named())
    engine.update_weights(source, timeout=0)
    with pytest.raises(WeightError, match="were not complete within 0 seconds"):
        engine.finish_update()
    source.resume.set()
    engine.update_weights(untied.named())
    assert engine.finish_update() == 1


def test_cancel_update_stops_staging(untied: Pair, open_engine: OpenEngine) -> None:
    engine = open_engine(untied)
    source = PausedSource(untied.named())
    engine.update_weights(source)
    thread = next(one for one in threading.enumerate() if one.name == "weight-staging" and one.is_alive())
    assert engine.cancel_update() and not engine.cancel_update()
    assert engine.weight_info().update == "idle"
    source.resume.set()
    thread.join(30)
    assert source.num_given <= 2, "the thread ended at the next tensor"
    assert engine.finish_update() == 0 and matches(engine, untied.old)
    assert engine.update_weights(untied.named(), blocking=True) == 1 and matches(engine, untied.new)


def test_finish_update_raises_failure_seen_by_a_step(
    untied: Pair, open_engine: OpenEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine = open_engine(untied)
    engine.update_weights({Q: torch.zeros(1)})
    assert engine.parts.weights is not None and engine.parts.weights.wait() == "failed"
    assert engine.generate([PROMPT], GREEDY)[0].weight_version == 0
    assert "a weight update was rejected, version 0 stays installed" in caplog.text
    with pytest.raises(WeightError, match="the shape"):
        engine.finish_update()
    assert engine.finish_update() == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_running": "drop"}, "on_running must be one of keep, recompute, abort, wait, got 'drop'"),
        ({"blocking": "yes"}, "blocking must be true or false"),
        ({"version": 1.5}, "version must be an integer or a string"),
        ({"checksum": 5}, "checksum must be a string"),
        ({"timeout": -1}, "timeout must be in"),
    ],
)
def test_invalid_argument_is_named(
    options: dict[str, object], message: str, untied: Pair, open_engine: OpenEngine
) -> None:
    engine = open_engine(untied)
    with pytest.raises(BadRequest, match=message):
        engine.update_weights(untied.named(), **options)  # type: ignore[arg-type]
    assert engine.weight_info() == (0, None, "idle")


class PatientUpdates(WeightSyncManager):
    """Waits for a minute where an engine waits for seconds."""

    def cancel(self, wait: float = 0.0) -> bool:
        return super().cancel(60.0 if wait else 0.0)


@pytest.mark.parametrize("kernels", ["off", "auto"])
def test_shutdown_waits_for_the_current_piece(kernels: str, untied: Pair, open_engine: OpenEngine) -> None:
    """Otherwise torch's copy would abort a process that exits meanwhile."""
    entered, may_copy = threading.Event(), threading.Event()

    def delay() -> None:
        entered.set()
        assert may_copy.wait(60)

    def delayed(parts: EngineParts) -> EngineParts:
        executor: Any = InPieces(parts.executor, delay)  # type: ignore[arg-type]
        return replace(parts, weights=PatientUpdates(executor))

    engine = open_engine(untied, delayed, kernels=kernels)
    started = threading.Event()

    def named() -> Iterator[tuple[str, torch.Tensor]]:
        started.wait(60)
        yield from untied.named().items()

    engine.update_weights(named(), blocking=False)
    (staging,) = [one for one in threading.enumerate() if one.name == "weight-staging"]
    started.set()
    assert entered.wait(60)
    closing = threading.Thread(target=engine.shutdown)
    closing.start()
    closing.join(0.1)
    assert closing.is_alive()
    may_copy.set()
    closing.join(60)
    assert not closing.is_alive() and not staging.is_alive()
