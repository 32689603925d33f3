"""A step with activation checkpointing against one without, bit for bit."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from ac_core.apply import apply_activation_checkpointing, remove_activation_checkpointing
from ac_core.config import ActivationCheckpointingConfig, PolicyName, Scope
from ac_core.discovery.blocks import BlockChoice
from ac_core.errors import ActivationCheckpointingError
from ac_core.proof.compare import Comparison, Difference, compare
from ac_core.proof.meters import is_fake
from ac_core.proof.restore import random_states, reshard, restored, same_state
from ac_core.proof.step import Loss, check_model, copy_batch, named_tensors, run_forward
from ac_core.region.cache import turn_cache_off, turn_cache_on
from ac_core.region.contexts import ContextFn
from ac_core.region.forward import checkpointed_forwards, without_checkpointing
from ac_core.report import Report

_SHOWN = 10
"""Differences of one kind that the table shows."""


@dataclass(frozen=True, repr=False)
class Verification:
    """The outcome of `verify`, true where all is equal. `print(result)` shows a table. Of a sharded model: this rank's.

    loss: the loss, or the tensors of the output that stand for it. gradients: of every parameter, and of the tensors in
    the batch that need one. buffers: after the step, and the plain attributes of the modules that the step changed.
    rng: the state in which the generators are left. Each is true where all are equal, and says in `.differences` which
    are not and by how much.
    unstable: in what the model without checkpointing differs from itself, in two steps from the same state. This is not
    compared again with checkpointing.
    report: what was applied, where `verify` applied it. idle: checkpointed blocks that the step did not call, or not
    with gradients on: nothing of them was verified.
    """

    loss: Comparison
    gradients: Comparison
    buffers: Comparison
    rng: Comparison
    unstable: tuple[Difference, ...]
    report: Report | None
    idle: tuple[str, ...] = ()

    @property
    def deterministic(self) -> bool:
        """Whether the model without checkpointing repeats itself, so that there is something to compare with."""
        return not self.unstable

    @property
    def equal(self) -> bool:
        """Whether all numbers are those of the model without checkpointing; never of one that is not deterministic."""
        return self.deterministic and all(comparison for _, comparison in self._comparisons())

    def __bool__(self) -> bool:
        return self.equal  # so that `assert verify(model, batch)` is no test that cannot fail

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "equal": self.equal,
            **{kind: bool(comparison) for kind, comparison in self._comparisons()},
            "deterministic": self.deterministic,
            "compared": {kind: comparison.compared for kind, comparison in self._comparisons()},
            "differences": [d.to_dict() for _, comparison in self._comparisons() for d in comparison.differences],
            "unstable": [d.to_dict() for d in self.unstable],
            "idle": list(self.idle),
        }

    def __str__(self) -> str:
        return self._table()

    def __repr__(self) -> str:
        return self._table()  # what pytest shows of a failed assert

    def _table(self) -> str:
        head = "with activation checkpointing against without: "
        if not self.deterministic:
            head += (
                "no verdict, the model differs from itself without activation checkpointing (see "
                "torch.use_deterministic_algorithms)"
            )
        else:
            head += "equal, bit for bit" if self.equal else "NOT equal"
        lines = [head, "  kind       compared  different"]
        if self.idle:
            lines.append(f"  not called in this step, or not with gradients on: {', '.join(self.idle)}")
        lines += [f"  {kind:<9}  {c.compared:<8}  {len(c.differences)}" for kind, c in self._comparisons()]
        for _, comparison in self._comparisons():
            lines += _listed(comparison.differences, "")
        return "\n".join([*lines, *_listed(self.unstable, "without checkpointing, a second time: ")])

    def _comparisons(self) -> Iterator[tuple[str, Comparison]]:
        return ((kind, getattr(self, kind)) for kind in ("loss", "gradients", "buffers", "rng"))


def verify(
    model: nn.Module,
    batch: Mapping[str, Any] | tuple | list | Tensor,
    config: ActivationCheckpointingConfig | bool | PolicyName | None = "full",
    *,
    loss: Loss | None = None,
    scope: Scope | list[str] | None = None,
    blocks: BlockChoice | Iterable[BlockChoice] | None = None,
    context_fn: ContextFn | Iterable[ContextFn] | None = None,
) -> Verification:
    """Compare a forward and backward with activation checkpointing with one without, bit for bit.

    Four steps are run, each from the same gradients (none), buffers and random numbers, with the key/value cache off:
    two without checkpointing, to see that the model repeats itself, then two with, since what the first learns may
    change the second. The model comes out as it went in, also after an error. Under DDP and FSDP2, call it on every
    rank; each compares what it holds.

        assert verify(model, batch, "full").equal

    Args:
        model: any module, in the mode (`train()` or `eval()`) to be verified.
        batch, loss: as for `measure`.
        config, scope, blocks, context_fn: as for `apply_activation_checkpointing`, whose work is undone at the end.
            `config=None`: the model is checkpointed already, verify what is applied.

    Raises:
        TypeError, ValueError: an argument has no such value.
        ActivationCheckpointingError: a config is given for a model that ac-core checkpoints already, or none for one
            that it does not; it cannot be applied; there is nothing to compare.
    """
    check_model(model)
    applied = bool(checkpointed_forwards(model))
    _refuse(model, config, applied, has_options=any(o is not None for o in (scope, blocks, context_fn)))
    report = None
    configs_with_cache = turn_cache_off(model)
    try:
        if applied:
            with without_checkpointing(model):
                expected, unstable = _steps_without(model, batch, loss)
            comparisons, idle = _steps_with(model, batch, loss, expected, unstable)
        else:
            expected, unstable = _steps_without(model, batch, loss)
            options = {"scope": scope, "blocks": blocks, "context_fn": context_fn, "batch": batch}
            with _applied(model, config, **options) as report:
                comparisons, idle = _steps_with(model, batch, loss, expected, unstable)
    finally:
        turn_cache_on(configs_with_cache)
    return Verification(**comparisons, unstable=unstable, report=report, idle=idle)


def _refuse(model: nn.Module, config: object, applied: bool, *, has_options: bool) -> None:
    if applied and (config is not None or has_options):
        raise ActivationCheckpointingError(
            "ac-core already checkpoints this model; verify(model, batch, None) verifies what is applied, and after "
            "remove_activation_checkpointing(model) a config can be given"
        )
    if not applied and config is None:
        raise ActivationCheckpointingError(
            "config: None verifies what is applied, and ac-core checkpoints no block of this model; give a policy, as "
            "in verify(model, batch, 'full')"
        )
    if any(map(is_fake, model.parameters())):
        raise ActivationCheckpointingError("the model's tensors are fake or on the meta device: no values to compare")


@contextmanager
def _applied(model: nn.Module, config: Any, **options: Any) -> Iterator[Report]:
    report = apply_activation_checkpointing(model, config, **options)
    try:
        yield report
    finally:
        remove_activation_checkpointing(model)


@dataclass
class _Outcome:
    """The numbers of one step, as copies."""

    loss: dict[str, Tensor]
    gradients: dict[str, Tensor]
    buffers: dict[str, Any]
    rng: dict[str, Any]


def _step(model: nn.Module, batch: Any, loss: Loss | None) -> _Outcome:
    with torch.inference_mode(mode=False), restored(model) as before:
        batch = copy_batch(batch)
        forward, values = run_forward(model, batch, loss)
        values = {name: value.clone() for name, value in values.items()}
        forward.backward()
        reshard(model)
        holders = {**dict(named_tensors(batch, "batch")), **dict(model.named_parameters())}
        gradients = {}
        for name, holder in holders.items():
            if holder.grad is not None:
                gradients[name] = holder.grad.detach().clone()
                holder.grad = None  # one at a time, so that there is never a second set of them
        return _Outcome(values, gradients, before.changes(), random_states(model))


def _steps_without(model: nn.Module, batch: Any, loss: Loss | None) -> tuple[_Outcome, tuple[Difference, ...]]:
    """The outcome of one step, and in what a second differs."""
    expected = _step(model, batch, loss)
    again = _compare(expected, _step(model, batch, loss), ())
    return expected, tuple(d for comparison in again.values() for d in comparison.differences)


def _steps_with(
    model: nn.Module, batch: Any, loss: Loss | None, expected: _Outcome, unstable: tuple[Difference, ...]
) -> tuple[dict[str, Comparison], tuple[str, ...]]:
    """In what two steps with checkpointing differ from `expected`, by kind, and the blocks that were not called. One
    outcome at a time is held."""
    forwards = [forward for _, forward in checkpointed_forwards(model)]
    for forward in forwards:
        forward.called = False
    try:
        first, second = (_compare(expected, _step(model, batch, loss), unstable) for _ in range(2))
    except Exception as error:
        error.add_note("raised in a step with activation checkpointing; two steps without it had gone through")
        raise
    idle = tuple(forward.name for forward in forwards if not forward.called)
    if forwards and len(idle) == len(forwards):
        raise ActivationCheckpointingError(
            f"none of the {len(forwards)} blocks ('{idle[0]}', ...) was called through its forward with gradients on, "
            "so nothing is checkpointed: the model calls another method of them, or runs them in an autograd.Function"
        )
    return {kind: first[kind].joined(second[kind]) for kind in first}, idle


def _compare(expected: _Outcome, got: _Outcome, unstable: Iterable[Difference]) -> dict[str, Comparison]:
    """By kind, leaving out what is unstable."""
    left_out = {(d.kind, d.name) for d in unstable}
    return {
        kind: compare(
            kind,
            getattr(expected, kind),
            getattr(got, kind),
            same=same_state if kind == "rng" else None,
            without=frozenset(name for of, name in left_out if of == kind),
        )
        for kind in (field.name for field in fields(_Outcome))
    }


def _listed(differences: tuple[Difference, ...], prefix: str) -> list[str]:
    lines = [f"  {prefix}{difference.kind}: {difference}" for difference in differences[:_SHOWN]]
    rest = len(differences) - _SHOWN
    return [*lines, f"  {prefix}... and {rest} more"] if rest > 0 else lines
