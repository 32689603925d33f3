"""The fused loss in transformers' generation classes against each model's own loss, on tiny random models on the CPU.

hatch run python -m tools.loss_sweep                        every class: one line a miss, then the counts
hatch run python -m tools.loss_sweep --only GPT2LMHeadModel --json loss.json

A class is exact where the loss differs by at most 1e-6 and no parameter's gradient by more than 1e-5, relative, in fp32
(a gradient that is itself below a tenth of the whole: by 1e-6 of the whole), and no tensor is made in the step whose
storage could hold the logits; refused where ac-loss says why it cannot; wrong otherwise. BLT is exact and listed: its
patcher, another model inside of it, computes logits of its own.
"""

import argparse
import json
import logging
import os
import random
import sys
import warnings
from collections import Counter
from pathlib import Path

from tools.sweep.runner import Record, run

LARGEST = 8_000_000


def check(name: str, kind: str) -> Record:
    """One class: ``outcome`` is exact, refused, wrong, failed, or untrainable (here, with or without the loss)."""
    from ac_loss.huggingface import FusedLossError, use_fused_loss

    record: Record = {"name": name, "kind": kind, "outcome": "untrainable", "reason": ""}
    try:
        model, inputs = _model_and_inputs(name)
        plain, plain_logits = _step(model, inputs)
    except Exception as error:  # noqa: BLE001 - some classes cannot be built or trained tiny
        return record | {"reason": f"{type(error).__name__}: {error}"}
    try:
        use_fused_loss(model)
        fused, logits = _step(model, inputs)
    except FusedLossError as error:
        return record | {"outcome": "refused", "reason": str(error)}
    except Exception as error:  # noqa: BLE001 - this is what the sweep looks for
        return record | {"outcome": "failed", "reason": f"{type(error).__name__}: {error}"}
    reason = f"logits were computed, the first {logits[0]}" if logits else ""
    if difference := _differences(plain, fused):
        return record | {"outcome": "wrong", "reason": difference}
    return record | {"outcome": "exact" if len(logits) < len(plain_logits) else "wrong", "reason": reason}


def _model_and_inputs(name):
    from ac_core.region.cache import turn_cache_off
    from tools.sweep.inputs import make_inputs
    from tools.sweep.models import tiny_model

    model = tiny_model(name)
    if sum(parameter.numel() for parameter in model.parameters()) > LARGEST:
        raise ValueError("no tiny configuration of it")
    inputs = make_inputs(model)
    if "labels" not in inputs:
        raise ValueError("takes no labels")
    turn_cache_off(model)
    return model, inputs


def _step(model, inputs):
    """Loss and gradients by name, and the shapes of tensors that could have held the logits."""
    import numpy
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    from tools.sweep.sizes import VOCABULARY

    least = VOCABULARY * (inputs["labels"].numel() - len(inputs["labels"]))
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
            for tensor in tree_leaves(out):
                if isinstance(tensor, torch.Tensor) and tensor.shape[-1:] == (VOCABULARY,):
                    storage = tensor.untyped_storage()
                    large = storage.nbytes() // tensor.element_size() >= least
                    if large and storage.data_ptr() not in given:  # the head's weight may be as large
                        seen.append(list(tensor.shape))
            return out

    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.zero_grad(set_to_none=True)
    random.seed(7)
    numpy.random.seed(7)
    torch.manual_seed(7)
    with Watch():
        output = model(**inputs)
        loss = output.loss if hasattr(output, "loss") else output[0]
        loss.backward()
    if not torch.isfinite(loss):
        raise ValueError(f"the loss is {loss.item()}")
    for name, buffer in model.named_buffers():
        if name in buffers and buffer.shape == buffers[name].shape:
            buffer.copy_(buffers[name])
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **gradients}, seen


def _differences(plain, fused) -> str:
    import torch

    if missing := plain.keys() ^ fused.keys():
        return f"{len(missing)} gradients on one side only, the first {min(missing)}"
    whole = torch.stack([value.norm() for name, value in plain.items() if name != "loss"]).norm()
    for name, value in plain.items():
        away, least = (fused[name] - value).norm(), 1e-6 if name == "loss" else 1e-5
        if away > least * value.norm() and (name == "loss" or away > 1e-6 * whole):
            return f"{name} by {(away / value.norm()).item():.1e}"
    return ""


def _work() -> None:
    """Answers each line ``kind name`` with a line of JSON; run by `tools.sweep.runner`."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what models print is no answer
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    import torch

    from ac_loss.backends.torch_backend import chunking

    torch.set_num_threads(1)
    chunking.ROWS_WIDE = chunking.ROWS_NARROW = chunking.ROWS_FLOOR = 16  # several chunks in a tiny batch
    for line in sys.stdin:
        kind, name = line.split()
        answers.write(json.dumps(check(name, kind)) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(prog="loss_sweep", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="CLASS", help="these classes alone")
    parser.add_argument("--jobs", type=int, default=1, help="processes at the same time, one thread each")
    parser.add_argument("--limit", type=float, default=120, metavar="SECONDS", help="for one class")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.work:
        _work()
        return 0
    from tools.sweep.models import classes

    records: list[Record] = []

    def done(record: Record) -> None:
        records.append(record)
        if record["reason"]:
            print(f"{record['outcome']} {record['name']}: {' '.join(str(record['reason']).split())[:240]}", flush=True)

    wanted = [(name, kind) for name, kind in classes().items() if not asked.only or name in asked.only]
    run(wanted, [sys.executable, "-m", "tools.loss_sweep", "--work"], jobs=asked.jobs, limit=asked.limit, done=done)
    outcomes = Counter(str(record["outcome"]) for record in records)
    print(", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common()), f"of {len(records)} classes")
    if asked.json:
        asked.json.write_text(json.dumps(records, indent=1) + "\n")
    return int(any(outcome in outcomes for outcome in ("wrong", "failed", "crashed", "too slow")))


if __name__ == "__main__":
    sys.exit(main())
