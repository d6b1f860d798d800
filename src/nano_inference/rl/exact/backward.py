"""The graph of `train_logprobs`: a node for each layer, so that its gradients are stored before the next one's exist.

The values are the engine's, so the graph has empty links between its nodes. The head's node, the first of a backward
pass, computes the residuals of all layers; each layer's node then runs its layer again, with a graph.

Shapes: N scored tokens, C of a chunk, E hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nano_inference.rl.exact.head import head_width, known_of, logprobs_of
from nano_inference.rl.exact.logits import logits_of
from nano_inference.rl.exact.policy import Policy, StaleWeights
from nano_inference.rl.exact.program import Buffers, Part, Texts, Tokens, parts_of, run_part, tokens_of


def with_recomputed_gradient(values_N: Tensor, mask_N: Tensor, policy: Policy, texts: Texts) -> Tensor:
    """Return the values with the gradient of the policy's program; 0 for tokens outside the mask."""
    work = _Recomputation(policy, texts)
    link = torch.zeros((), device=values_N.device)
    for index in range(len(work.parts) - 1):
        link = _Layer.apply(link, work, index, *policy.leaves_of(work.owned[index]))  # type: ignore[no-untyped-call]
    found = _Head.apply(values_N, mask_N, link, work, *policy.leaves_of(work.owned[-1]))  # type: ignore[no-untyped-call]
    return cast(Tensor, found)


class _Recomputation:
    """Owns what the nodes of a backward pass give to the next: residuals, their gradients, sums of weights'."""

    def __init__(self, policy: Policy, texts: Texts) -> None:
        program = policy.program
        head = Part((*program.final, *program.head), ("logits",))
        self.parts = [*parts_of(program, by_layer=policy.by_layer), head]
        first: dict[str, int] = {}
        for index, part in enumerate(self.parts):
            for name in part.weights:
                first.setdefault(name, index)
        self.owned = [[name for name in part.weights if first[name] == i] for i, part in enumerate(self.parts)]
        """The weights whose gradients a part's node returns: the last node of those that use them."""
        self._policy, self._texts, self._state = policy, texts, policy.state()
        self._tokens: Tokens | None = None
        self._given: list[Buffers] = []  # what the parts that are left read
        self._graph: tuple[Buffers, Buffers, Buffers] | None = None  # of the last layer, until it is used
        self._grads: Buffers = {}  # of the results of the last part that is left
        self._sums: dict[str, Tensor] = {}  # gradients of weights that parts which are left use, too

    def run_head(self, grad_N: Tensor, is_wanted: Sequence[bool]) -> list[Tensor | None]:
        """Compute all residuals, and the gradients at the last one; return those of the weights owned by the head."""
        policy, texts, head = self._policy, self._texts, self.parts[-1]
        if self._state != policy.state():  # fused optimizers are not noticed by saved tensors
            raise StaleWeights("the weights have changed between the forward and the backward pass")
        weights = self._weights(head)
        some = next(iter(weights.values()))
        tokens = self._tokens = tokens_of(policy.program, texts, some.dtype, some.device)
        self._given, self._sums = [{}], {}
        with torch.no_grad():
            for part in self.parts[:-2]:
                self._given.append(run_part(part, self._given[-1], self._weights(part), tokens))
        self._graph = self._with_graph(self.parts[-2])
        x_NE = self._graph[-1]["x"].detach()
        names = self._wanted(-1, is_wanted)
        known, width = known_of(texts), head_width(policy.program)
        targets = [token for ids, start in zip(texts.ids, texts.starts, strict=True) for token in ids[start:]]
        take = None
        if policy.needs_logits(texts.params):
            take = logits_of(policy.engine, texts.ids, texts.starts, width)

        def chunk(piece: slice) -> Tensor:
            x_CE = x_NE[piece].requires_grad_()
            target_C = torch.tensor(targets[piece], device=x_CE.device)
            exact_CV = None if take is None else take(len(target_C))
            buffers = run_part(head, {"x": x_CE}, weights, tokens)
            out_C = logprobs_of(buffers.pop("logits"), target_C, known[piece], exact_CV)
            asked = [x_CE, *(weights[name] for name in names)]
            grad_CE, *found = torch.autograd.grad(out_C, asked, grad_N[piece].to(out_C))
            self._add(names, found)
            return grad_CE

        pieces = (slice(start, start + width) for start in range(0, len(known), width))
        self._grads = {"x": torch.cat([x_NE[:0], *map(chunk, pieces)])}
        return self._taken(-1)

    def run_layer(self, index: int, is_wanted: Sequence[bool], *, with_input: bool) -> list[Tensor | None]:
        """Compute the gradients of a layer, and `with_input` those of what it reads; return those that it owns."""
        given, weights, results = self._graph or self._with_graph(self.parts[index])
        self._graph = None
        names = self._wanted(index, is_wanted)
        read = list(given) if with_input else []
        with_gradient = [name for name, value in results.items() if value.requires_grad]
        found = torch.autograd.grad(
            [results[name] for name in with_gradient],
            [*(given[name] for name in read), *(weights[name] for name in names)],
            [self._grads[name] for name in with_gradient],
        )
        self._grads = dict(zip(read, found, strict=False))
        self._add(names, found[len(read) :])
        return self._taken(index)

    def _weights(self, part: Part) -> Buffers:
        leaves = self._policy.leaves_of(part.weights)
        computed = self._policy.computed(part.weights)
        return {
            name: value.requires_grad_(leaf.requires_grad)
            for (name, value), leaf in zip(computed.items(), leaves, strict=True)
        }

    def _with_graph(self, part: Part) -> tuple[Buffers, Buffers, Buffers]:
        """Return what the part reads, its weights and its results."""
        assert self._tokens is not None
        given = {name: value.detach().requires_grad_() for name, value in self._given.pop().items()}
        weights = self._weights(part)
        return given, weights, run_part(part, given, weights, self._tokens)

    def _wanted(self, index: int, is_wanted: Sequence[bool]) -> list[str]:
        """Return the weights of a part that need a gradient: its own as autograd asks, and those of earlier parts."""
        part, owned = self.parts[index], self.owned[index]
        asked = [name for name, wanted in zip(owned, is_wanted, strict=True) if wanted]
        others = [name for name in part.weights if name not in owned]
        leaves = self._policy.leaves_of(others)
        return asked + [name for name, leaf in zip(others, leaves, strict=True) if leaf.requires_grad]

    def _add(self, names: Sequence[str], grads: Sequence[Tensor]) -> None:
        for name, grad in zip(names, grads, strict=True):
            if name in self._sums:
                self._sums[name] += grad
            else:
                self._sums[name] = grad.to_dense() if grad.is_sparse else grad

    def _taken(self, index: int) -> list[Tensor | None]:
        owned = self.owned[index]
        sums = [self._sums.pop(name, None) for name in owned]
        leaves = self._policy.leaves_of(owned)
        return [None if one is None else one.to(leaf.dtype) for one, leaf in zip(sums, leaves, strict=True)]


class _Head(torch.autograd.Function):
    """Given values; its backward pass, the first, starts the recomputation."""

    @staticmethod
    def forward(
        ctx: Any, values_N: Tensor, mask_N: Tensor, link: Tensor, work: _Recomputation, *leaves: Tensor
    ) -> Tensor:
        ctx.work = work
        ctx.save_for_backward(mask_N, *leaves)
        return values_N.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Any, ...]:
        mask_N, *_ = ctx.saved_tensors  # raises if an optimizer changed them in the meantime
        with torch.enable_grad(), torch.autocast(grad_N.device.type, enabled=False):
            found = ctx.work.run_head(grad_N * mask_N, ctx.needs_input_grad[4:])
        return None, None, grad_N.new_zeros(()), None, *found


class _Layer(torch.autograd.Function):
    """A link from one layer to the next; its backward pass computes the layer's gradients."""

    @staticmethod
    def forward(ctx: Any, link: Tensor, work: _Recomputation, index: int, *leaves: Tensor) -> Tensor:
        ctx.work, ctx.index = work, index
        ctx.save_for_backward(*leaves)
        return link.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, link: Tensor) -> tuple[Any, ...]:
        ctx.saved_tensors  # noqa: B018 - raises if an optimizer changed them in the meantime
        with_input, _, _, *is_wanted = ctx.needs_input_grad
        with torch.enable_grad(), torch.autocast(link.device.type, enabled=False):
            found = ctx.work.run_layer(ctx.index, is_wanted, with_input=with_input)
        return link, None, None, *found
