"""From a mismatch to an error that explains it: the recompute is run again, watched, and then with changes undone."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ac_core.errors import RecomputeMismatchError
from ac_core.region.causes import Evidence, probable_cause
from ac_core.region.evidence import Change, PlainState, Snapshot, describe_state, undisturbed
from ac_core.region.recording import Meta, Recording, Saved


@dataclass
class Mismatch:
    """A recompute that differs, as it is known when that is found.

    forward: what the forward saved. recomputed: what the recompute saved, by position, where known. count: how many
    tensors it saved. forward_saved, recompute_saved: with the calls, under `check_recompute`. arguments: of the block.
    then: the block's state in the forward. forward_node: the autograd node that saved the tensor at a position in the
    forward, or empty. again: recomputes once more, with a context entered just before the block itself runs.
    """

    block: nn.Module
    name: str
    forward: list[Meta]
    recomputed: dict[int, Meta]
    count: int
    forward_saved: list[Saved] | None
    recompute_saved: list[Saved] | None
    values_only: bool
    arguments: tuple[Any, ...]
    plain: PlainState
    then: Snapshot | None
    forward_node: Callable[[int], str]
    again: Callable[[AbstractContextManager[Any]], None]

    @property
    def index(self) -> int:
        """The position of the first difference: of a tensor, or behind the end of the shorter list."""
        if self.values_only:
            pairs = zip(self.forward_saved or (), self.recompute_saved or (), strict=False)
            return next(i for i, (was, now) in enumerate(pairs) if was.fingerprint != now.fingerprint)
        shorter = min(len(self.forward), self.count)
        return next((i for i in range(shorter) if self.recomputed.get(i, self.forward[i]) != self.forward[i]), shorter)


def diagnose(mismatch: Mismatch) -> RecomputeMismatchError:
    """The error to raise. Runs the block a few times more; its attributes, buffers and all random numbers are
    afterwards what they were."""
    index = mismatch.index
    evidence = Evidence(mismatch.block, values_only=mismatch.values_only)
    evidence.forward = _at(mismatch.forward, index)
    evidence.forward_saved = _at(mismatch.forward_saved, index)
    evidence.forward_node = mismatch.forward_node(index)
    saved = _watch(mismatch, evidence, index)
    evidence.recompute = mismatch.recomputed.get(index) or (evidence.saved.meta if evidence.saved else None)
    _undo_changes(mismatch, evidence, index)
    cause, others = probable_cause(evidence)
    lines = [
        f"block '{mismatch.name}': its recompute saved other {'values' if mismatch.values_only else 'tensors'} than its "
        "forward did, so its gradients would be wrong",
        f"  first difference: saved tensor {index + 1} (the forward saved {len(mismatch.forward)})",
        f"    forward:    {_told(evidence.forward, evidence.forward_saved or evidence.forward_node)}",
        f"    recompute:  {_told(evidence.recompute, evidence.saved)}",
    ]
    if index > 0 and None in (evidence.forward, evidence.recompute) and (last := _at(saved, index - 1)):
        lines.append(f"    the last on which both agree: {last.meta}, saved by {last}")
    lines.append(f"  probable cause ({cause.kind}): {cause.seen}")
    lines.append(f"  remedy: {cause.remedy}")
    lines.extend(f"  also seen ({other.kind}): {other.seen}" for other in others)
    return RecomputeMismatchError("\n".join(lines), block=mismatch.name, index=index, cause=cause.kind)


def _watch(mismatch: Mismatch, evidence: Evidence, index: int) -> list[Saved]:
    """Two recomputes: what saves the tensor, what each run changes, and do they agree with one another?"""
    changes: list[Change] = []

    @contextmanager
    def look() -> Iterator[None]:
        if mismatch.then is not None:
            changes.extend(mismatch.plain.changes(mismatch.then))
        yield

    before = describe_state(mismatch.block, mismatch.arguments)
    with undisturbed(mismatch.block):
        first = _record(mismatch, look())
        after = describe_state(mismatch.block, mismatch.arguments)
    with undisturbed(mismatch.block):
        second = _record(mismatch, _nothing())
    saved = mismatch.recompute_saved or first.saved
    evidence.changed = changes
    evidence.moved = [Change(path, was, after.get(path)) for path, was in before.items() if after.get(path) != was]
    evidence.repeatable = _same(first.saved, second.saved)
    evidence.repeated = first.saved[index].meta if index < len(first.saved) else None
    evidence.choices = [choice for choice in first.choices if choice.position <= index]
    evidence.saved = _at(saved, index) if index < mismatch.count else None
    return saved


def _undo_changes(mismatch: Mismatch, evidence: Evidence, index: int) -> None:
    """Which of the changes, undone, makes the recompute save what the forward saved? Those that do not help are no
    cause."""
    if mismatch.then is None or not evidence.changed:
        return
    one_by_one: dict[str, list[Change]] = {}
    for change in evidence.changed:
        one_by_one.setdefault("training" if change.path.endswith("training") else change.path, []).append(change)
    trials = [*one_by_one.values()][:8] + [evidence.changed] * (len(one_by_one) > 1)
    for trial in trials:
        paths = {change.path for change in trial}
        with undisturbed(mismatch.block):
            recording = _record(mismatch, mismatch.plain.as_it_was(mismatch.then, paths))
        if mismatch.values_only or mismatch.forward_saved:
            same = _same(recording.saved, mismatch.forward_saved or [])
        else:
            same = [saved.meta for saved in recording.saved[: len(mismatch.forward)]] == mismatch.forward
        if same:
            evidence.changed, evidence.confirmed = trial, True
            evidence.forward_saved = evidence.forward_saved or _at(recording.saved, index)
            return
    evidence.changed = []


def _record(mismatch: Mismatch, probe: AbstractContextManager[Any]) -> Recording:
    recording = Recording(mismatch.block, fingerprints=mismatch.forward_saved is not None)
    try:
        with torch.enable_grad(), recording.everything():
            mismatch.again(probe)
    except Exception:  # what was recorded until then is still worth telling
        pass
    return recording


def _same(one: list[Saved], other: list[Saved]) -> bool:
    return [(s.meta, s.fingerprint) for s in one] == [(s.meta, s.fingerprint) for s in other]


def _told(meta: Meta | None, by: Saved | str | None) -> str:
    if meta is None:
        return "none"
    place = f" in '{by.module}'" if isinstance(by, Saved) and by.module else ""
    return f"{meta}{f', saved by {by}{place}' if by else ''}"


def _at(items: list[Any] | None, index: int) -> Any:
    return items[index] if items is not None and index < len(items) else None


@contextmanager
def _nothing() -> Iterator[None]:
    yield
