"""One class: training steps under a policy against the same step without it, bit for bit."""

import random
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy
import torch
from torch import Tensor, nn

from ac_core import (
    ActivationCheckpointingError,
    Block,
    apply_activation_checkpointing,
    find_blocks,
    remove_activation_checkpointing,
)
from ac_core.region.cache import turn_cache_off, turn_cache_on
from tools.sweep.inputs import Inputs, make_inputs
from tools.sweep.models import tiny_model

LARGEST = 8_000_000
"""Parameters above which a class is left out: its configuration has a size that `sizes.py` does not know."""

EQUAL = "equal"
OUTCOMES = {
    EQUAL: "loss, every gradient, every buffer and the random state are those of no checkpointing",
    "different": "trains under the policy and gives other numbers",
    "idle": "the same numbers, but a block that the report says is checkpointed was not recomputed",
    "refused": "ac-core says that it cannot checkpoint this class, and why",
    "failed": "another error under the policy",
    "crashed": "the process died",
    "too slow": "took longer than the limit for one class",
    "nondeterministic": "differs from itself without checkpointing",
    "untrainable": "no training step without checkpointing either",
    "unbuilt": "the model cannot be built here",
    "too large": "no tiny configuration of it",
}
NOT_RUN = ("nondeterministic", "untrainable", "unbuilt", "too large")
"""Outcomes that say nothing about the policy."""


@dataclass
class Result:
    """What became of one class.

    outcome: a key of `OUTCOMES`; reason: empty for `equal`. media: the arguments that carry something else than text.
    towers: part other than language -> whether a gradient reached it. blocks: how many the report says are
    checkpointed; recomputed: how many of them ran again in the backward.
    """

    name: str
    kind: str
    outcome: str = EQUAL
    reason: str = ""
    parameters: int = 0
    media: list[str] = field(default_factory=list)
    towers: dict[str, bool] = field(default_factory=dict)
    blocks: int = 0
    recomputed: int = 0
    seconds: float = 0.0


class _End(Exception):  # noqa: N818 - how a check ends early, not an error
    def __init__(self, outcome: str, reason: str) -> None:
        self.outcome = outcome
        self.reason = reason


def check(name: str, kind: str, policy: str, dropout: float = 0.0) -> Result:
    """Train the class called `name` for two steps without and two under `policy`, all from one state, on the CPU."""
    result = Result(name, kind)
    start = time.perf_counter()
    try:
        _check(result, policy, dropout)
    except _End as end:
        result.outcome, result.reason = end.outcome, end.reason
    result.seconds = round(time.perf_counter() - start, 2)
    return result


def _check(result: Result, policy: str, dropout: float) -> None:
    with _Stage("unbuilt"):
        model = tiny_model(result.name, dropout)
    result.parameters = sum(p.numel() for p in model.parameters())
    if result.parameters > LARGEST:
        raise _End("too large", f"{result.parameters / 1e6:.0f} million parameters")
    with _Stage("untrainable"):
        inputs = make_inputs(model)
        result.media = sorted(set(inputs) - _TEXT)
        blocks = find_blocks(model)
        runs = _Runs(blocks)
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        configs = turn_cache_off(model)
        with _Used(blocks) as used:
            plain, ran = _step(model, inputs, buffers), runs.take()
        in_backward = used.names()
        result.towers = _towers(blocks)
        again = _step(model, inputs, buffers)
        turn_cache_on(configs)
    if not torch.isfinite(plain.loss):
        raise _End("untrainable", f"the loss is {plain.loss.item()}")
    same_rng = torch.equal(plain.rng, again.rng)  # Reformer seeds the generator anew in every forward
    if differences := _differences(plain, again, rng=False):
        raise _End("nondeterministic", differences)
    with _Stage("failed"):
        report = apply_activation_checkpointing(model, policy)
        if _cache_is_on(model):  # a class that is another function without its cache
            remove_activation_checkpointing(model)
            runs.take()
            plain, ran = _step(model, inputs, buffers), runs.take()
            report = apply_activation_checkpointing(model, policy)
        result.blocks = len(report.applied_blocks)
        runs.take()
        first, again_ran = _step(model, inputs, buffers), runs.take()
        second = _step(model, inputs, buffers)  # a policy may learn from its first step what to keep
    recomputed = {name for name in report.applied_blocks if again_ran[name] > ran[name]}
    result.recomputed = len(recomputed)
    for when, step in (("", first), ("in the second step ", second)):
        if differences := _differences(plain, step, rng=same_rng):
            raise _End("different", when + differences)
    if idle := [name for name in report.applied_blocks if name in in_backward - recomputed]:
        raise _End("idle", f"{len(idle)} of {result.blocks} blocks, the first is {idle[0]}")


_TEXT = {"input_ids", "attention_mask", "labels", "decoder_input_ids", "mm_token_type_ids", "token_type_ids"}


class _Stage:
    """Ends the check with `outcome` where its body raises."""

    def __init__(self, outcome: str) -> None:
        self.outcome = outcome

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            refused = isinstance(error, ActivationCheckpointingError)
            place = traceback.extract_tb(error.__traceback__)[-1]
            said = " ".join(str(error).split())[:240]
            reason = said if refused else f"{type(error).__name__}: {said} ({place.filename.rsplit('/')[-1]})"
            raise _End("refused" if refused else self.outcome, reason) from error


@dataclass
class _Outcome:
    loss: Tensor
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]
    rng: Tensor


def _step(model: nn.Module, inputs: Inputs, buffers: dict[str, Tensor]) -> _Outcome:
    """Forward and backward, from the same random state and with `buffers` in the model."""
    for name, buffer in model.named_buffers():
        if name in buffers and buffer.shape == buffers[name].shape:  # a table of positions may have grown
            buffer.copy_(buffers[name])
    model.zero_grad(set_to_none=True)
    random.seed(7)
    numpy.random.seed(7)
    torch.manual_seed(7)
    output = model(**inputs)
    loss = getattr(output, "loss", None)
    if loss is None:
        loss = output.logits.float().square().mean()
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    after = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return _Outcome(loss.detach(), gradients, after, torch.get_rng_state())


def _differences(expected: _Outcome, got: _Outcome, *, rng: bool) -> str:
    found = []
    if not torch.equal(expected.loss, got.loss):
        found.append(f"loss by {(expected.loss - got.loss).abs().item():.1e}")
    for what in ("gradients", "buffers"):
        left, right = getattr(expected, what), getattr(got, what)
        if missing := left.keys() ^ right.keys():
            found.append(f"{len(missing)} {what} on one side only, the first {min(missing)}")
        other = [name for name in left if name in right and not torch.equal(left[name], right[name])]
        if other:
            found.append(f"{len(other)} of {len(left)} {what}, the first {other[0]}")
    if rng and not torch.equal(expected.rng, got.rng):
        found.append("the random state")
    return "; ".join(found)


class _Runs:
    """Counts how often each block runs, a recompute included, by the modules inside it: hooks of the block itself stay
    outside what is recomputed."""

    def __init__(self, blocks: Iterable[Block]) -> None:
        self._counts: Counter[str] = Counter()
        for block in blocks:
            for module in block.module.modules():
                if module is not block.module:
                    module.register_forward_pre_hook(lambda *_, name=block.name: self._counts.update((name,)))

    def take(self) -> Counter[str]:
        counts, self._counts = self._counts, Counter()
        return counts


def _cache_is_on(model: nn.Module) -> bool:
    configs = turn_cache_off(model)
    turn_cache_on(configs)
    return bool(configs)


class _Used:
    """Which blocks the backward goes through, found with hooks in one step: `names()` after it.

    A block is used where a gradient reaches every parameter of it and its outputs as well. Parameters alone do not
    tell: another block may have the same. Where the outputs need no gradient although the parameters get one, the
    block ran in a way that no checkpoint sees (an `autograd.Function` of the model's own), and counts as used.
    """

    def __init__(self, blocks: Iterable[Block]) -> None:
        self._blocks = list(blocks)
        self._without: set[str] = set()

    def __enter__(self) -> "_Used":
        self._handles = [
            block.module.register_forward_hook(lambda _, __, output, name=block.name: self._watch(name, output))
            for block in self._blocks
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def names(self) -> set[str]:
        return {block.name for block in self._blocks if _has_gradients(block)} - self._without

    def _watch(self, name: str, output: object) -> None:
        for tensor in _tensors(output):
            if tensor.requires_grad:
                self._without.add(name)
                tensor.register_hook(lambda _: self._without.discard(name))


def _tensors(output: object) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, tuple | list | dict):
        for value in output.values() if isinstance(output, dict) else output:
            yield from _tensors(value)


def _has_gradients(block: Block) -> bool:
    gradients = [p.grad is not None for p in block.module.parameters() if p.requires_grad]
    return bool(gradients) and all(gradients)


def _towers(blocks: Iterable[Block]) -> dict[str, bool]:
    reached: dict[str, bool] = {}
    for block in blocks:
        if block.part != "language":
            gradients = [p.grad for p in block.module.parameters() if p.grad is not None]
            reached[block.part] = reached.get(block.part, False) or any(bool(g.any()) for g in gradients)
    return reached
