"""The command line: `python -m tools.bench_moe`."""

import argparse
import json
import os
import sys
from dataclasses import fields, replace

from tools.bench_moe import __doc__ as description
from tools.bench_moe.launch import RanksError, run
from tools.bench_moe.results import evaluate
from tools.bench_moe.settings import BUFFERS, DISPATCHERS, DTYPES, FORMS, SHAPES, Settings, Shape
from tools.bench_moe.show import as_data, page


def main(arguments: list[str] | None = None) -> int:
    """Parse, run, print; the exit status. Progress and errors go to standard error."""
    parser = _parser()
    asked = parser.parse_args(arguments)
    try:
        settings = _settings(asked)
    except ValueError as error:
        parser.error(str(error))
    load = {"before": os.getloadavg()[0]}
    try:
        reports = run(settings, asked.timeout)
    except RanksError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    load["after"] = os.getloadavg()[0]
    machine = {"device": reports[0].device, "torch": reports[0].torch, "cpus": os.cpu_count(), "load": load}
    results = [evaluate(settings, case) for case in zip(*(report.cases for report in reports), strict=True)]
    print(json.dumps(as_data(settings, machine, results), indent=1) if asked.json else page(settings, machine, results))
    return 0


def _settings(asked: argparse.Namespace) -> Settings:
    gpus = _gpus() if asked.device == "cuda" else None
    if gpus == 0:
        raise ValueError("device: cuda, but torch sees no GPU here; leave --device out for the CPU")
    ranks = asked.ranks or gpus or 2
    if gpus is not None and ranks > gpus:
        raise ValueError(f"ranks: {ranks}, but torch sees {gpus} GPUs; each rank needs one of its own")
    given = {field.name: getattr(asked, field.name) for field in fields(Shape)}
    return Settings(
        shape=replace(SHAPES[asked.device], **{name: size for name, size in given.items() if size is not None}),
        device=asked.device,
        dtype=asked.dtype or ("float32" if gpus is None else "bfloat16"),
        ranks=ranks,
        rounds=asked.rounds,
        dispatchers=tuple(asked.dispatcher or DISPATCHERS),
        forms=tuple(asked.form or FORMS),
        buffer=asked.buffer,
    )


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench_moe",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=SHAPES, default="cpu", help="default: cpu")
    parser.add_argument("--ranks", type=int, help="default: 2, or all GPUs")
    parser.add_argument("--dtype", choices=DTYPES, help="default: float32, on a GPU bfloat16")
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds, 5 or more (default 7)")
    parser.add_argument("--dispatcher", choices=DISPATCHERS, action="append", help="only this one; repeatable")
    parser.add_argument("--form", choices=FORMS, action="append", help="only this form of the layer; repeatable")
    parser.add_argument(
        "--buffer", choices=BUFFERS, default="reference", help="of hybridep; deep_ep takes DeepEP's kernels"
    )
    for field in fields(Shape):
        default = " or ".join(f"{getattr(shape, field.name)} ({device})" for device, shape in SHAPES.items())
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=int, metavar="N", help=f"default: {default}")
    parser.add_argument("--timeout", type=float, default=900, help="seconds until the ranks are killed (default 900)")
    parser.add_argument("--json", action="store_true", help="one object on standard output instead of the tables")
    return parser


if __name__ == "__main__":
    sys.exit(main())
