"""Time, peak memory and errors of the fused loss's backends beside plain cross-entropy, Cut Cross-Entropy and Liger.

    hatch run kernels:python tools/gpu_loss.py --out loss.json           # on a GPU: three heads of real sizes, bf16
    hatch run kernels:python tools/gpu_loss.py --out loss.json --small   # a tiny head, anywhere; kernels interpreted

Needs torch and `ac_loss` alone (`PYTHONPATH=packages/ac-loss/src`); triton, cut_cross_entropy and liger_kernel are
used where they are installed. The JSON and the last line of each table say whether our kernels hold at most 1.05 x the
gradients' bytes and take no more time than the other two. Cut Cross-Entropy drops gradients below 2^-12 by default, and
random logits have few others: its time here is the best that it can have.
"""

import argparse
import importlib.util
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

Loss = Callable[["Tensor", "Tensor", "Tensor"], "Tensor"]


class Shape(NamedTuple):
    """A head and the tokens it sees."""

    tokens: int
    vocab: int
    hidden_size: int


SHAPES = {
    "Gemma 2 2B": Shape(8192, 256000, 2304),
    "Llama 3.2 1B": Shape(16384, 128256, 2048),
    "Llama 3.1 8B": Shape(8192, 128256, 4096),
}
SMALL = {"small": Shape(48, 600, 64)}
TARGET = 1.05


def contestants() -> dict[str, Loss]:
    """Each with default settings unless its name says otherwise; those that cannot run say so when they are called."""
    import torch
    import torch.nn.functional as F

    from ac_loss import linear_cross_entropy

    def plain(hidden: "Tensor", weight: "Tensor", labels: "Tensor") -> "Tensor":
        return F.cross_entropy(F.linear(hidden, weight).float(), labels)

    def cce(hidden: "Tensor", weight: "Tensor", labels: "Tensor", **options: object) -> "Tensor":
        from cut_cross_entropy import linear_cross_entropy as theirs

        return theirs(hidden, weight, labels, **options)

    def liger(hidden: "Tensor", weight: "Tensor", labels: "Tensor") -> "Tensor":
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy as theirs

        return theirs(hidden, weight, labels)

    def native(hidden: "Tensor", weight: "Tensor", labels: "Tensor") -> "Tensor":
        return F.linear_cross_entropy(hidden, weight, labels, options=torch.nn.LinearCrossEntropyOptions())

    return {
        "plain": plain,
        "ac_loss triton": partial(linear_cross_entropy, backend="triton"),
        "ac_loss torch": partial(linear_cross_entropy, backend="torch"),
        "ac_loss torch, param": partial(linear_cross_entropy, backend="torch", accum="param"),
        "ac_loss torch, recompute": partial(linear_cross_entropy, backend="torch", grad_mode="recompute"),
        "cce": cce,
        "cce, nothing dropped": partial(cce, filter_eps=None),
        "cce, torch_compile": partial(cce, impl="torch_compile"),
        "liger": liger,
        "native": native,
    }


def draw(shape: Shape, dtype: "object", device: str, ignored: float = 0.0) -> tuple["Tensor", "Tensor", "Tensor"]:
    """Hidden states and a weight that require gradients, and labels of which a share is ignored."""
    import torch

    torch.manual_seed(0)
    hidden = torch.randn(shape.tokens, shape.hidden_size, device=device).to(dtype)
    weight = (torch.randn(shape.vocab, shape.hidden_size, device=device) * 0.05).to(dtype)
    labels = torch.randint(0, shape.vocab, (shape.tokens,), device=device)
    labels[: int(ignored * shape.tokens)] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def step(loss: Loss, inputs: tuple["Tensor", "Tensor", "Tensor"]) -> dict[str, float]:
    """One forward and backward: seconds, and on a GPU the most bytes beyond the inputs, gradients included."""
    import torch

    hidden, weight, _ = inputs
    hidden.grad = weight.grad = None
    gpu = hidden.is_cuda
    if gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    start = time.perf_counter()
    loss(*inputs).backward()
    if gpu:
        torch.cuda.synchronize()
    measured = {"seconds": time.perf_counter() - start}
    if gpu:
        measured["peak_bytes"] = torch.cuda.max_memory_allocated() - before
    hidden.grad = weight.grad = None
    return measured


def race(shape: Shape, device: str, rounds: int, ignored: float) -> dict[str, dict[str, object]]:
    """Median seconds and largest peak of every contestant, interleaved; the first two rounds warm up."""
    import torch

    inputs = draw(shape, torch.bfloat16, device, ignored)
    kept: dict[str, list[dict[str, float]]] = {}
    failed: dict[str, dict[str, object]] = {}
    for turn in range(rounds + 2):
        for name, loss in contestants().items():
            if name in failed:
                continue
            try:
                measured = step(loss, inputs)
            except Exception as error:  # noqa: BLE001 - a peer that fails is a row of the table, not the end of it
                failed[name] = {"failed": f"{type(error).__name__}: {error}"[:500]}
                continue
            if turn >= 2:
                kept.setdefault(name, []).append(measured)
    floor = 2 * shape.hidden_size * (shape.vocab + shape.tokens) + 4 * shape.tokens
    rows: dict[str, dict[str, object]] = {}
    for name, runs in kept.items():
        rows[name] = {"seconds": statistics.median(run["seconds"] for run in runs)}
        if "peak_bytes" in runs[0]:
            peak = max(run["peak_bytes"] for run in runs)
            rows[name] |= {"peak_bytes": peak, "peak_over_floor": peak / floor}
    return rows | {name: row for name, row in failed.items() if name not in rows}


def errors(device: str, small: bool) -> dict[str, dict[str, dict[str, float]]]:
    """Relative errors of loss and gradients against the fp64 specification, by dtype."""
    import torch

    from ac_loss import reference

    shape = Shape(40, 300, 64) if small else Shape(1500, 5003, 256)
    found: dict[str, dict[str, dict[str, float]]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        hidden, weight, labels = draw(shape, dtype, device, ignored=0.2)
        exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
        truth = reference.linear_cross_entropy(*exact, labels)
        truth.backward()
        rows = found.setdefault(str(dtype).removeprefix("torch."), {})
        for name, loss in contestants().items():
            hidden.grad = weight.grad = None
            try:
                value = loss(hidden, weight, labels)
                value.backward()
            except Exception as error:  # noqa: BLE001 - as above
                rows[name] = {"failed": f"{type(error).__name__}: {error}"[:500]}
                continue
            pairs = ((value, truth), (hidden.grad, exact[0].grad), (weight.grad, exact[1].grad))
            rows[name] = {
                part: ((ours.detach().double() - true).norm() / true.norm()).item()
                for part, (ours, true) in zip(("loss", "hidden", "weight"), pairs, strict=True)
            }
    return found


def verdict(rows: dict[str, dict[str, object]]) -> dict[str, bool | None]:
    """Which targets our kernels meet on one shape; None where one side was not measured on a GPU."""
    ours = rows["ac_loss triton"]
    peak = ours.get("peak_over_floor")

    def no_slower_than(name: str) -> bool | None:
        theirs = rows[name].get("seconds")
        return None if peak is None or theirs is None else ours["seconds"] <= theirs

    return {
        f"peak <= {TARGET} x floor": None if peak is None else peak <= TARGET,
        "time <= cce": no_slower_than("cce"),
        "time <= liger": no_slower_than("liger"),
    }


def main() -> None:
    """Measure everything, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="where the JSON goes")
    parser.add_argument("--small", action="store_true", help="a tiny head")
    parser.add_argument("--rounds", type=int, default=7, help="measured runs of each, after two to warm up")
    parser.add_argument("--ignored", type=float, default=0.0, help="share of ignored labels, 0 to 1")
    options = parser.parse_args()

    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    result = {
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "installed": {m: bool(importlib.util.find_spec(m)) for m in ("triton", "cut_cross_entropy", "liger_kernel")},
        "ignored": options.ignored,
        "errors": errors(device, options.small),
        "shapes": {},
    }
    for dtype, rows in result["errors"].items():
        for name, row in rows.items():
            print(f"errors, {dtype}, {name}: {row.get('failed') or ', '.join(f'{k} {v:.1e}' for k, v in row.items())}")
    for name, shape in (SMALL if options.small else SHAPES).items():
        rows = race(shape, device, options.rounds, options.ignored)
        result["shapes"][name] = {**shape._asdict(), "contestants": rows, "targets": verdict(rows)}
        options.out.write_text(json.dumps(result, indent=1))
        print(f"{name}: {shape.tokens} tokens, vocabulary {shape.vocab}, hidden size {shape.hidden_size}")
        for contestant, row in rows.items():
            if "failed" in row:
                print(f"  {contestant:<26} {row['failed']}")
                continue
            line = f"  {contestant:<26} {1e3 * row['seconds']:9.2f} ms"
            if device == "cuda":
                line += f"  {row['peak_bytes'] / 2**30:6.2f} GiB = {row['peak_over_floor']:.3f} x floor"
            print(line)
        print("  " + ", ".join(f"{target}: {met}" for target, met in result["shapes"][name]["targets"].items()))
        if device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
