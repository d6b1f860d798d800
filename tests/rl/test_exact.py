"""Exact log-probabilities in a trainer: equal bits, gradients against Transformers, and every way to be stale."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from nano_inference import BadRequest, EngineConfig, InferenceEngine, SamplingParams, TrainingSample
from nano_inference.loading.checkpoint import open_checkpoint
from nano_inference.models import ops
from nano_inference.models.families import program_of
from nano_inference.rl.exact import Policy, StaleWeights, exact_executor, exact_values, train_logprobs
from nano_inference.rl.exact.program import DIFFERENTIABLE
from tests.models.families import FAMILIES, make_model
from tests.models.hybrids import HYBRIDS, MODULES, make_hybrid
from tests.nanochat.tiny import write_checkpoint
from tests.rl.exact_checks import PROMPTS, Case, made, sampled, texts_of


def theirs(model: nn.Module, samples: list[TrainingSample], temperature: float) -> Tensor:
    """Transformers' log-probabilities [N], one text at a time."""
    found = []
    for ids, start in zip(*texts_of(samples), strict=True):
        logits_TV = model(torch.tensor([ids])).logits[0, start - 1 : -1] / temperature
        found.append(logits_TV.log_softmax(-1).gather(-1, torch.tensor(ids[start:])[:, None])[:, 0])
    return torch.cat(found)


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    yield from made(request.param, tmp_path_factory.mktemp("exact"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    yield from made("llama3-rope-ratio3-tied", tmp_path_factory.mktemp("exact"))


def test_values_are_the_sampled_ones(case: Case) -> None:
    samples = case.samples()
    values = train_logprobs(case.policy, samples, temperature=0.8)
    assert torch.equal(values, sampled(samples)) and values.requires_grad
    mine = theirs(case.model, samples, 0.8)
    assert torch.equal(exact_values(case.engine, samples, mine=mine, temperature=0.8), sampled(samples))
    assert not torch.equal(train_logprobs(case.policy, samples, temperature=0.8001), values)


@pytest.mark.parametrize("by_layer", [True, False])
def test_gradients_are_those_of_transformers_in_float64(case: Case, by_layer: bool) -> None:
    samples = case.samples()
    weight_N = torch.randn(len(sampled(samples)), generator=torch.Generator().manual_seed(0))
    case.model.zero_grad()
    policy = replace_by_layer(case.policy, by_layer)
    (train_logprobs(policy, samples, temperature=0.8) * weight_N).sum().backward()
    ours = {name: value.grad.double() for name, value in case.model.named_parameters()}
    exact = type(case.model)(case.model.config).double()
    exact.load_state_dict({name: value.double() for name, value in case.model.state_dict().items()})
    exact.eval()
    (theirs(exact, samples, 0.8) * weight_N.double()).sum().backward()
    check_gradients(ours, exact)


def check_gradients(ours: dict[str, Tensor], exact: nn.Module) -> None:
    squares = torch.zeros(2, dtype=torch.float64)
    for name, value in exact.named_parameters():
        off = (ours[name] - value.grad).norm()
        assert off <= 1e-5 * value.grad.norm(), name
        squares += torch.stack([off.square(), value.grad.norm().square()])
    assert (squares[0] / squares[1]).sqrt() <= 2e-6


def plain_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **_: object
) -> tuple[Tensor, Tensor]:
    """The gated delta rule of each token after the other, in the precision of its arguments (Transformers: float32)."""
    each = value.size(2) // key.size(2)
    q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (query, key))
    q, k = (x.repeat_interleave(each, dim=2) for x in (q / q.size(-1) ** 0.5, k))
    outs, state = [], value.new_zeros(*value.shape[:1], value.size(2), k.size(-1), value.size(-1))
    for t in range(value.size(1)):
        state = state * g[:, t].double().exp()[..., None, None]
        delta = (value[:, t] - (state * k[:, t, ..., None]).sum(-2)) * beta[:, t, :, None]
        state = state + k[:, t, ..., None] * delta[:, :, None]
        outs.append((state * q[:, t, ..., None]).sum(-2))
    return torch.stack(outs, dim=1), state


@pytest.mark.parametrize("name", HYBRIDS)
def test_gradients_through_recurrent_states(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for case in made(name, tmp_path):
        samples = case.samples(max_tokens=60)  # longer than a chunk
        weights = {n: value.detach().double().requires_grad_() for n, value in case.model.named_parameters()}
        policy = Policy(case.engine, weights)
        policy.sync()
        values = train_logprobs(policy, samples, temperature=0.8)
        assert torch.equal(values, sampled(samples))
        values.sum().backward()
        exact = copy.deepcopy(case.model).double()
        for module in MODULES:
            monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", plain_rule)
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "float", torch.Tensor.double)  # of norms and decays, at their places in float32
            theirs(exact, samples, 0.8).sum().backward()
        check_gradients({n: value.grad for n, value in weights.items() if value.grad is not None}, exact)


def replace_by_layer(policy: Policy, by_layer: bool) -> Policy:
    other = Policy(policy.engine, zip(policy.names, policy.leaves, strict=True), by_layer=by_layer)
    other.sync()
    return other


NANOCHAT = ("G0", "G2", "G2e", "G4")  # `test_exact_nanochat` compares their derivatives


def test_gradient_of_every_operation_is_compared_in_some_program(tmp_path: Path) -> None:
    """An operation that no family here has would have a gradient that no test looks at."""
    found: set[type[Any]] = set()
    for name in (*FAMILIES, *HYBRIDS, *NANOCHAT):
        if name in FAMILIES:
            make_model(name, tmp_path / name)
        elif name in HYBRIDS:
            make_hybrid(name, tmp_path / name)
        else:
            write_checkpoint(tmp_path / name, name)
        found |= {type(op) for op in program_of(open_checkpoint(tmp_path / name).config).ops}
    assert found == {*DIFFERENTIABLE, ops.Store, ops.Keep}
    assert set(ops.Op.__args__) - found == {ops.Reduce}


@pytest.mark.parametrize("kind", [ops.Rotate, ops.Softcap])
def test_operation_without_gradient_is_refused_by_name(
    kind: type[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(DIFFERENTIABLE, kind)  # type: ignore[arg-type]
    model = make_model("gemma2", tmp_path)
    config = EngineConfig(str(tmp_path), device="cpu", dtype="float32")
    with InferenceEngine(config) as engine, pytest.raises(BadRequest, match=f"gradient: {kind.__name__}$"):
        Policy(engine, model)


# ---- the distribution that was sampled from -------------------------------------------------------------------------

Warpers = transformers.LogitsProcessorList
LISTS: dict[str, tuple[SamplingParams, list[Any]]] = {
    "top-p": (SamplingParams(top_p=0.8), [transformers.TopPLogitsWarper(0.8)]),
    "top-k": (SamplingParams(top_k=15), [transformers.TopKLogitsWarper(15)]),
    "min-p": (SamplingParams(min_p=0.1), [transformers.MinPLogitsWarper(0.1)]),
    "repetition": (SamplingParams(repetition_penalty=1.4), [transformers.RepetitionPenaltyLogitsProcessor(1.4)]),
    "both": (
        SamplingParams(repetition_penalty=1.4, top_k=30),
        [transformers.RepetitionPenaltyLogitsProcessor(1.4), transformers.TopKLogitsWarper(30)],
    ),
}


@pytest.mark.parametrize("name", LISTS)
def test_gradient_of_a_restricted_distribution(llama: Case, name: str) -> None:
    params, processors = LISTS[name]
    asked = replace(params, max_tokens=20, seed=5)
    samples = llama.engine.generate(PROMPTS, asked, 3)
    texts, starts = texts_of(samples)
    llama.model.zero_grad()
    values = train_logprobs(llama.policy, samples, params=asked)
    assert torch.equal(values, sampled(samples))
    values.sum().backward()
    ours = {key: value.grad.clone() for key, value in llama.model.named_parameters()}
    llama.model.zero_grad()
    warped, total = Warpers(processors), torch.zeros(())
    for ids, start in zip(texts, starts, strict=True):
        logits_TV = llama.model(torch.tensor([ids])).logits[0]
        for place in range(start, len(ids)):
            seen = torch.tensor([sorted(set(ids[:place]))])  # once each: torch's scatter repeats gradients otherwise
            row_1V = warped(seen, logits_TV[place - 1 : place])
            total = total + row_1V.log_softmax(-1)[0, ids[place]]
    total.backward()
    for key, value in llama.model.named_parameters():
        assert (ours[key] - value.grad).norm() <= 2e-5 * value.grad.norm(), key


# ---- staleness ------------------------------------------------------------------------------------------------------

CHANGES: dict[str, Callable[[Policy, torch.optim.Optimizer], object]] = {
    "optimizer": lambda policy, optimizer: optimizer.step(),
    "in place": lambda policy, optimizer: policy.leaves[0].detach().add_(1e-3),
    "another update": lambda policy, optimizer: policy.engine.update_weights(
        {name: leaf.detach() for name, leaf in zip(policy.names, policy.leaves, strict=True)}, blocking=True
    ),
    "data, reported": lambda policy, optimizer: (policy.leaves[0].data.add_(1e-3), policy.changed()),
}
OPTIMIZERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda leaves: torch.optim.SGD(leaves, lr=1e-3),
    "foreach": lambda leaves: torch.optim.AdamW(leaves, lr=1e-3, foreach=True),
    "loop": lambda leaves: torch.optim.AdamW(leaves, lr=1e-3, foreach=False),
    "fused": lambda leaves: torch.optim.AdamW(leaves, lr=1e-3, fused=True),
    "muon": lambda leaves: torch.optim.Muon([one for one in leaves if one.dim() == 2], lr=1e-3),
}


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Case]:
    yield from made("llama3-rope-ratio3-tied", tmp_path)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_step_of_an_optimizer_makes_the_policy_stale(fresh: Case, kind: str) -> None:
    optimizer = OPTIMIZERS[kind](list(fresh.policy.leaves))
    policy = Policy(fresh.engine, fresh.model, [OPTIMIZERS["sgd"](list(fresh.policy.leaves)), optimizer])
    samples = fresh.samples()
    with pytest.raises(StaleWeights, match="sync"):
        train_logprobs(policy, samples)
    policy.sync()
    train_logprobs(policy, samples, temperature=0.8).sum().backward()
    optimizer.step()
    with pytest.raises(StaleWeights, match="sync"):
        train_logprobs(policy, samples)
    policy.sync()
    assert not torch.equal(train_logprobs(policy, samples, temperature=0.8), sampled(samples))
    later = fresh.samples()
    assert torch.equal(train_logprobs(policy, later, temperature=0.8), sampled(later))


@pytest.mark.parametrize("kind", CHANGES)
def test_change_of_weights_makes_the_policy_stale(fresh: Case, kind: str) -> None:
    optimizer = OPTIMIZERS["foreach"](list(fresh.policy.leaves))
    samples = fresh.samples()
    train_logprobs(fresh.policy, samples).sum().backward()
    CHANGES[kind](fresh.policy, optimizer)
    with pytest.raises(StaleWeights, match="sync"):
        train_logprobs(fresh.policy, samples)


def test_step_between_forward_and_backward_raises(fresh: Case) -> None:
    samples = fresh.samples()
    train_logprobs(fresh.policy, samples).sum().backward()
    loss = train_logprobs(fresh.policy, samples).sum()
    OPTIMIZERS["foreach"](list(fresh.policy.leaves)).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_fused_step_between_forward_and_backward_raises(fresh: Case) -> None:
    optimizer = OPTIMIZERS["fused"](list(fresh.policy.leaves))
    policy = Policy(fresh.engine, fresh.model, optimizer)
    policy.sync()
    samples = fresh.samples()
    train_logprobs(policy, samples).sum().backward()
    loss = train_logprobs(policy, samples).sum()
    optimizer.step()
    with pytest.raises(StaleWeights, match="between the forward and the backward pass"):
        loss.backward()


def test_staged_update_that_scoring_installs_is_noticed(fresh: Case) -> None:
    samples = fresh.samples()
    named = {name: value.detach() * 1.01 for name, value in fresh.model.named_parameters()}
    fresh.engine.update_weights(named, blocking=False)
    with pytest.raises(StaleWeights):
        for _ in range(1000):  # some steps later the update is staged
            train_logprobs(fresh.policy, samples)


@pytest.mark.parametrize("place", ["model.layers.1.mlp.down_proj.weight", "model.norm.weight"])
def test_one_ulp_of_one_weight_is_seen(fresh: Case, place: str) -> None:
    samples = fresh.samples()
    weight = dict(fresh.model.named_parameters())[place].detach().view(-1)
    weight[3] = torch.nextafter(weight[3], torch.tensor(torch.inf))
    fresh.policy.sync()
    assert not torch.equal(train_logprobs(fresh.policy, samples, temperature=0.8), sampled(samples))


# ---- what is left out, and what is refused --------------------------------------------------------------------------


def test_forced_tokens_are_zero_without_gradient(llama: Case) -> None:
    samples = [
        replace(
            one,
            mask=tuple(place % 3 != 1 for place in range(len(one.mask))),
            logprobs=tuple(0.0 if place % 3 == 1 else value for place, value in enumerate(one.logprobs)),
        )
        for one in llama.samples()
    ]
    mask_N = torch.tensor([bit for one in samples for bit in one.mask], dtype=torch.bool)
    values = train_logprobs(llama.policy, samples, temperature=0.8)
    assert torch.equal(values, sampled(samples))
    llama.model.zero_grad()
    values[~mask_N].sum().backward()
    assert all(leaf.grad is None or not leaf.grad.any() for leaf in llama.policy.leaves)
    mine = theirs(llama.model, samples, 0.8)[mask_N]
    assert torch.equal(exact_values(llama.engine, samples, mine=mine, temperature=0.8), sampled(samples)[mask_N])


def test_gradient_is_that_of_the_engines_mode(tmp_path: Path) -> None:
    """A mode that the parameters leave out is the engine's."""
    model = make_model("llama-ratio1-untied", tmp_path)
    config = EngineConfig(model_path=str(tmp_path), dtype="float32", device="cpu", logprobs_mode="raw")
    params = SamplingParams(max_tokens=20, seed=5, temperature=0.5, top_k=5)
    with InferenceEngine(config) as engine:
        policy = Policy(engine, model)
        policy.sync()
        samples = engine.generate(PROMPTS, params, 2)
        grads = []
        for asked in (params, replace(params, logprobs_mode="raw")):
            model.zero_grad()
            values = train_logprobs(policy, samples, params=asked)
            assert torch.equal(values, sampled(samples))
            values.sum().backward()
            grads.append([leaf.grad.clone() for leaf in policy.leaves])
    assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))


def test_parameters_of_bfloat16_have_a_gradient_summed_in_float32(llama: Case) -> None:
    samples = llama.samples()
    leaves = {
        name: nn.Parameter(leaf.detach().bfloat16())
        for name, leaf in zip(llama.policy.names, llama.policy.leaves, strict=True)
    }
    policy = Policy(llama.engine, leaves)
    policy.sync()
    train_logprobs(policy, samples, temperature=0.8).sum().backward()
    rounded = Policy(llama.engine, {name: nn.Parameter(leaf.detach().float()) for name, leaf in leaves.items()})
    rounded.sync()
    train_logprobs(rounded, samples, temperature=0.8).sum().backward()
    llama.policy.changed()
    llama.policy.sync()
    for one, exact in zip(policy.leaves, rounded.leaves, strict=True):
        assert torch.equal(one.grad, exact.grad.bfloat16())


def test_values_keep_their_bits_beside_a_graph_of_lower_precision(llama: Case) -> None:
    samples = llama.samples()
    mine = theirs(llama.model, samples, 0.8).bfloat16()
    assert torch.equal(exact_values(llama.engine, samples, mine=mine, temperature=0.8), sampled(samples))


def test_surroundings_leave_values_and_gradients(llama: Case) -> None:
    """Autocast, micro-batches and frozen parameters."""
    samples = llama.samples()
    llama.model.zero_grad()
    train_logprobs(llama.policy, samples, temperature=0.8).sum().backward()
    whole = [leaf.grad.clone() for leaf in llama.policy.leaves]
    llama.model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        values = train_logprobs(llama.policy, samples, temperature=0.8)
        assert torch.equal(values, sampled(samples))
        values.sum().backward()
    assert all(torch.equal(leaf.grad, one) for leaf, one in zip(llama.policy.leaves, whole, strict=True))
    llama.model.zero_grad()
    for one in samples:
        train_logprobs(llama.policy, [one], temperature=0.8).sum().backward()
    for leaf, one in zip(llama.policy.leaves, whole, strict=True):
        assert (leaf.grad - one).norm() <= 1e-5 * one.norm()
    frozen = llama.policy.leaves[1].requires_grad_(False)
    try:
        llama.model.zero_grad()
        train_logprobs(llama.policy, samples, temperature=0.8).sum().backward()
        assert frozen.grad is None
        assert sum(leaf.grad is not None for leaf in llama.policy.leaves) == len(whole) - 1
    finally:
        frozen.requires_grad_(True)


def test_what_is_not_exact_is_refused_by_name(llama: Case, tmp_path: Path) -> None:
    samples = llama.samples()
    model, engine, policy = llama.model, llama.engine, llama.policy
    two = replace(samples[0], token_versions=(*samples[0].token_versions[:-1], 7))
    dropping = nn.Sequential(nn.Dropout(0.1))
    some = dict(list(model.named_parameters())[:3])
    dropping_model = type(model)(
        transformers.LlamaConfig(**model.config.to_dict() | {"attention_dropout": 0.3})
    ).train()
    off = EngineConfig(model_path=engine.config.model_path, dtype="float32", device="cpu", kernels="off")
    with InferenceEngine(off) as plain:
        refused: list[tuple[str, Callable[[], object]]] = [
            ("kernels", lambda: Policy(plain, model)),
            ("kernels", lambda: exact_values(plain, samples, mine=torch.zeros(3))),
            ("parameters", lambda: Policy(engine, dropping)),
            ("parameters", lambda: Policy(engine, some)),
            ("parameters", lambda: Policy(engine, dropping_model)),
            ("samples", lambda: train_logprobs(policy, [])),
            ("params", lambda: train_logprobs(policy, samples, params=[SamplingParams()], values=sampled(samples))),
            ("start", lambda: train_logprobs(policy, [[1, 2, 3]], ["a"])),  # type: ignore[list-item]
            ("samples", lambda: train_logprobs(policy, [two])),
            ("samples", lambda: exact_values(engine, [two], mine=torch.zeros(20))),
            ("samples", lambda: train_logprobs(policy, [[1, 2, 3]])),
            ("starts", lambda: train_logprobs(policy, [[1, 2, 3]], [0])),
            ("values", lambda: train_logprobs(policy, samples, values=torch.zeros(1))),
            ("mine", lambda: exact_values(engine, samples, mine=torch.zeros(1))),
        ]
        for field, call in refused:
            with pytest.raises(BadRequest) as caught:
                call()
            assert caught.value.field == field, field


PLACES: dict[str, tuple[dict[str, Any], str, str | None]] = {
    "ranks": ({"tensor_parallel": 2}, "cpu", "tensor_parallel"),
    "CUDA": ({}, "cuda", "deterministic"),
    "CUDA, deterministic": ({"deterministic": True}, "cuda", None),
}


@pytest.mark.parametrize("place", PLACES)
def test_engine_whose_rows_depend_on_the_batch_is_refused(place: str) -> None:
    options, device, field = PLACES[place]
    executor = SimpleNamespace(device=torch.device(device), code="cuda")
    engine: Any = SimpleNamespace(config=EngineConfig("model", **options), parts=SimpleNamespace(executor=executor))
    if field is None:
        assert exact_executor(engine) is executor
        return
    with pytest.raises(BadRequest) as caught:
        exact_executor(engine)
    assert caught.value.field == field


def test_module_whose_gradients_would_not_be_averaged_is_refused(llama: Case) -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(BadRequest, match="use exact_values"):
            Policy(llama.engine, nn.parallel.DistributedDataParallel(nn.Linear(2, 2)))
    finally:
        torch.distributed.destroy_process_group()
