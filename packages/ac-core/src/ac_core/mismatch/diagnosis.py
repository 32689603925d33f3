"""From a mismatch to an error that explains it: the recompute is run again, watched, and then with changes undone."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ac_core.errors import RecomputeMismatchError
from ac_core.mismatch.causes import Evidence, probable_cause
from ac_core.mismatch.evidence import Change, PlainState, Snapshot, describe_state, differ, undisturbed
from ac_core.mismatch.recording import Meta, Recording, Saved


@dataclass
class Mismatch:
    """A recompute that differs, as it is known when that is found.

    forward: what the forward saved. forward_nodes: the autograd nodes that saved it, by position, where known.
    recomputed: what the recompute saved, by position, where known. count: how many tensors it saved. forward_saved,
    recompute_saved: both with the calls, under `check_recompute`. values_only: nothing but the bits differ. arguments:
    of the block. then: the block's state in the forward. again: recomputes once more, with a context entered just
    before the block itself runs.
    """

    block: nn.Module
    name: str
    forward: list[Meta]
    forward_nodes: dict[int, str]
    recomputed: dict[int, Meta]
    count: int
    forward_saved: list[Saved] | None
    recompute_saved: list[Saved] | None
    values_only: bool
    arguments: tuple[Any, ...]
    plain: PlainState
    then: Snapshot | None
    again: Callable[[AbstractContextManager[Any]], None]

    def first_difference(self, saved: list[Saved]) -> int:
        """The position of the first tensor that differs, or behind the end of the shorter list. `saved`: what a
        recompute like this one saves, with the nodes: a tensor of the same shape saved by another node differs."""
        if self.values_only:
            pairs = zip(self.forward_saved or (), self.recompute_saved or (), strict=False)
            return next(i for i, (was, now) in enumerate(pairs) if was.fingerprint != now.fingerprint)
        shorter = min(len(self.forward), self.count)
        for position in range(shorter):
            if self.recomputed.get(position, self.forward[position]) != self.forward[position]:
                return position
            if position < len(saved):
                if saved[position].meta != self.forward[position]:
                    saved = []  # not like this one
                elif saved[position].node and saved[position].node != self.node(position, saved[position].node):
                    return position
        return shorter

    def node(self, position: int, default: str = "") -> str:
        """The node that saved a tensor in the forward."""
        recorded = _at(self.forward_saved, position)
        return (recorded.node if recorded else self.forward_nodes.get(position)) or default


def diagnose(mismatch: Mismatch) -> RecomputeMismatchError:
    """The error to raise. Runs the block a few times more; its attributes, buffers and all random numbers are
    afterwards what they were."""
    evidence = Evidence(mismatch.block)
    repeated = _watch(mismatch, evidence)
    saved = mismatch.recompute_saved or repeated
    index = mismatch.first_difference(saved)
    evidence.forward, evidence.forward_node = _at(mismatch.forward, index), mismatch.node(index)
    evidence.saved = _at(saved, index) if index < mismatch.count else None
    evidence.recompute = mismatch.recomputed.get(index) or (evidence.saved.meta if evidence.saved else None)
    evidence.repeated = repeated[index].meta if index < len(repeated) else None
    evidence.choices = [choice for choice in evidence.choices if choice.position <= index]
    if mismatch.then is not None and evidence.forward is not None:
        evidence.autocast_at_entry = mismatch.then.autocast(evidence.forward.device.type)
    forward_saved = _undo_changes(mismatch, evidence, index) or mismatch.forward_saved
    cause, others = probable_cause(evidence)
    what = "values" if mismatch.values_only else "tensors"
    lines = [
        f"block '{mismatch.name}': its recompute saved other {what} than its forward did; its gradients would be wrong",
        f"  first difference: saved tensor {index + 1} (the forward saved {len(mismatch.forward)})",
        f"    forward:    {_told(evidence.forward, _at(forward_saved, index) or evidence.forward_node)}",
        f"    recompute:  {_told(evidence.recompute, evidence.saved)}",
    ]
    if index > 0 and None in (evidence.forward, evidence.recompute) and (last := _at(saved, index - 1)):
        lines.append(f"    before it:  {_told(last.meta, last)}")
    lines.append(f"  probable cause ({cause.kind}): {cause.seen}")
    lines.append(f"  remedy: {cause.remedy}")
    lines.extend(f"  also seen ({other.kind}): {other.seen}" for other in others)
    return RecomputeMismatchError("\n".join(lines), block=mismatch.name, index=index, cause=cause.kind)


def _watch(mismatch: Mismatch, evidence: Evidence) -> list[Saved]:
    """Two recomputes: what saves the tensors, what each run changes, and do they agree with one another?"""
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
        second = _record(mismatch, nullcontext())
    evidence.changed = changes
    pairs = [(path, was, after.get(path)) for path, was in before.items()]
    evidence.moved = [Change(path, was, now) for path, was, now in pairs if differ(was, now)]
    evidence.repeatable = _same(first.saved, second.saved)
    evidence.choices = first.choices
    return first.saved


def _undo_changes(mismatch: Mismatch, evidence: Evidence, index: int) -> list[Saved] | None:
    """Which of the changes, undone, makes the recompute save what the forward saved? Those that do not help are no
    cause, unless the trial could not go as far as the difference. Returns what is saved with the cause undone."""
    if mismatch.then is None or not evidence.changed:
        return None
    one_by_one: dict[str, list[Change]] = {}
    for change in evidence.changed:
        one_by_one.setdefault("training" if change.path.endswith("training") else change.path, []).append(change)
    trials = [*one_by_one.values()][:8] + [evidence.changed] * (len(one_by_one) > 1)
    for trial in trials:
        with undisturbed(mismatch.block):
            run = _record(mismatch, mismatch.plain.as_it_was(mismatch.then, {change.path for change in trial}))
        if run.cut and len(run.saved) <= index:
            return None
        if _is_the_forward(mismatch, run):
            evidence.changed, evidence.confirmed = trial, True
            return run.saved
    evidence.changed = []
    return None


def _is_the_forward(mismatch: Mismatch, run: Recording) -> bool:
    so_far = len(run.saved) if run.cut else None
    if mismatch.forward_saved is not None:
        return _same(run.saved, mismatch.forward_saved[:so_far])
    return [saved.meta for saved in run.saved] == mismatch.forward[:so_far]


def _record(mismatch: Mismatch, probe: AbstractContextManager[Any]) -> Recording:
    recording = Recording(mismatch.block, fingerprints=mismatch.forward_saved is not None)
    try:
        with torch.enable_grad(), recording.everything():
            mismatch.again(probe)
    except Exception:  # noqa: BLE001 - what was recorded until then is still worth telling
        pass
    return recording


def _same(one: list[Saved], other: list[Saved]) -> bool:
    return [(s.meta, s.fingerprint) for s in one] == [(s.meta, s.fingerprint) for s in other]


def _told(meta: Meta | None, by: Saved | str | None) -> str:
    if meta is None:
        return "none"
    place = f"\n                at {by.place}" if isinstance(by, Saved) and by.place else ""
    return f"{meta}{f', saved by {by}' if by else ''}{place}"


def _at(items: list[Any] | None, index: int) -> Any:
    return items[index] if items is not None and index < len(items) else None
