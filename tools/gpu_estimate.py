"""What `ac_core.estimate` and `ac_core.plan` predict beside what a GPU gave out, on Llama-3.2-1B.

    python -m tools.gpu_estimate --out gpu.json            # on a GPU: bf16, AdamW, 8 x 2048
    python -m tools.gpu_estimate --out cpu.json --small    # the same rows of a tiny Llama on the CPU, anywhere

The rows of the guide's table that one card can run, `selective`, and plans for two budgets. FSDP2 has one rank here:
its units and their gathered parameters are there, a share of the state is not; the guide's 8 ranks are left out. Each
row is predicted and run in a process of its own, so that one that dies does not take the others along; one that does
not fit the card is a row that says so. *Measured* is `torch.cuda.max_memory_allocated` of steps after two that warm up
(`selective` learns in the first), and on the CPU the most that torch's allocator gave out in the third step.

Needs torch and transformers alone, so that it also runs from a checkout, without an install:
`PYTHONPATH=packages/ac-core/src:packages/ac-loss/src`.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ac_core.sizes import size_text

if TYPE_CHECKING:
    from torch import Tensor, nn

TARGET = 0.05
"""Of the measured peak, by which a prediction may be off."""
_WARM, _TIMED = 2, 3
_ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Row:
    """policy: a name, or for a plan the budget as a share of the peak without checkpointing. strategy: `"fsdp2"` is of
    one rank."""

    policy: str | float
    loss: str = "plain"
    strategy: str = "none"


ROWS = {
    "baseline": Row("none"),
    "checkpointing": Row("full"),
    "fused loss": Row("none", "fused"),
    "checkpointing and fused loss": Row("full", "fused"),
    "selective": Row("selective"),
    "selective and fused loss": Row("selective", "fused"),
    "plan for 75 % and fused loss": Row(0.75, "fused"),
    "plan for 50 % and fused loss": Row(0.5, "fused"),
    "FSDP2 of one rank, checkpointing and fused loss": Row("full", "fused", "fsdp2"),
}


@dataclass(frozen=True)
class Subject:
    """build: the model in training mode, in fp32. batch, sequence: of `vocab` entries."""

    build: "Callable[[], nn.Module]"
    batch: int
    sequence: int
    vocab: int
    device: str

    @classmethod
    def of(cls, *, small: bool) -> "Subject":
        """Llama-3.2-1B on the GPU; small: a tiny one on the CPU."""
        if small:
            return cls(_tiny_llama, batch=8, sequence=128, vocab=512, device="cpu")
        from tools.estimate.guide import BATCH, SEQUENCE, llama_3_2_1b

        return cls(llama_3_2_1b, BATCH, SEQUENCE, vocab=128256, device="cuda")

    def tokens(self) -> "dict[str, Tensor]":
        """Ids and labels, `[batch, sequence]`, on the device."""
        import torch

        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(self.vocab, (self.batch, self.sequence), generator=generator).to(self.device)
        return {"input_ids": ids, "labels": ids.clone()}


def _tiny_llama() -> "nn.Module":
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).train()


def measured_row(row: Row, subject: Subject) -> dict[str, Any]:
    """Peak bytes of a step as predicted and as given out, and its seconds; `out_of_memory`: what the card said."""
    import torch

    config, found = _predicted(row, subject)
    try:
        with _ranks(row, subject) as mesh:
            found |= _trained(partial(_built, row, config, subject, mesh), subject)
    except torch.OutOfMemoryError as error:
        return found | {"out_of_memory": str(error)}
    return found | {"difference": found["predicted_peak_bytes"] / found["peak_bytes"] - 1}


def _predicted(row: Row, subject: Subject) -> tuple[Any, dict[str, Any]]:
    """The policy to apply, and what is said of it."""
    import ac_core

    settings = {
        "batch_size": subject.batch,
        "sequence_length": subject.sequence,
        "loss": row.loss,
        "strategy": row.strategy,
        "device": subject.device,
    }
    start = time.perf_counter()
    if isinstance(row.policy, float):
        plan = ac_core.plan(subject.build, budget=row.policy, **settings)
        config, peak, moment = plan.to_config(), plan.peak_bytes, plan.peak_moment
    else:
        estimate = ac_core.estimate(subject.build, policy=row.policy, **settings)
        config, peak, moment = row.policy, estimate.peak_bytes, estimate.peak_moment
    seconds = time.perf_counter() - start
    return config, {"predicted_peak_bytes": peak, "predicted_moment": moment, "prediction_seconds": seconds}


@contextmanager
def _ranks(row: Row, subject: Subject) -> Iterator[Any]:
    """A mesh of this process alone, where the row has a strategy."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    if row.strategy == "none":
        yield None
        return
    backend = "nccl" if subject.device == "cuda" else "gloo"
    dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore())
    try:
        yield init_device_mesh(subject.device, (1,))
    finally:
        dist.destroy_process_group()


def _built(row: Row, config: Any, subject: Subject, mesh: Any) -> "nn.Module":
    import torch

    import ac_core
    from ac_loss import LossConfig, use_fused_loss

    torch.manual_seed(0)
    with torch.device(subject.device):
        model = subject.build()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    if row.loss == "fused":
        use_fused_loss(model, LossConfig(kind="fused", backend="torch"))  # the one that is modelled
    ac_core.apply_activation_checkpointing(model, config)
    if mesh is not None:
        from torch.distributed.fsdp import fully_shard

        for block in ac_core.find_blocks(model):
            fully_shard(block.module, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def _loss(model: "nn.Module", batch: "dict[str, Tensor]") -> "Tensor":
    return model(**batch).loss


def _trained(build: "Callable[[], nn.Module]", subject: Subject) -> dict[str, Any]:
    """Train a few steps: peak bytes, and the median of the seconds."""
    import torch

    from tools.estimate.truth import peak_of_step

    batch = subject.tokens()
    peak = peak_of_step(build, batch, _loss, torch.optim.AdamW) if subject.device == "cpu" else None
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    seconds = []
    for step in range(_WARM + _TIMED):
        if step == _WARM and peak is None:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        _loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        if peak is None:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return {
        "peak_bytes": torch.cuda.max_memory_allocated() if peak is None else peak,
        "step_seconds": statistics.median(seconds[_WARM:]),
    }


def row_in_a_process(name: str, *, small: bool, limit: float) -> dict[str, Any]:
    """What `measured_row` finds in a process of its own; `failed`: the end of what it said when it failed."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.json"
        flags = ["--row", name, "--out", str(out), *(["--small"] if small else [])]
        command = [sys.executable, "-m", "tools.gpu_estimate", *flags]
        try:
            done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False, timeout=limit)
        except subprocess.TimeoutExpired:
            return {"failed": f"no result within {limit:g} s"}
        if done.returncode:
            return {"failed": f"exit status {done.returncode}: {done.stderr[-2000:]}"}
        return json.loads(out.read_text())


def machine(device: str) -> dict[str, Any]:
    """The card and the versions."""
    import torch

    found = {"torch": torch.__version__, "transformers": version("transformers"), "python": platform.python_version()}
    if device == "cpu":
        return found | {"device": platform.processor() or platform.machine()}
    card = torch.cuda.get_device_properties(0)
    return found | {"device": card.name, "device_bytes": card.total_memory, "cuda": torch.version.cuda}


def line(name: str, row: dict[str, Any]) -> str:
    """A row of the table that is printed."""
    if "failed" in row:
        return f"{name:<48} failed: {row['failed']}"
    predicted = f"{name:<48} predicted {size_text(row['predicted_peak_bytes'])}, "
    if "out_of_memory" in row:
        return f"{predicted}does not fit: {row['out_of_memory'].partition('. ')[0]}"
    return (
        f"{predicted}measured {size_text(row['peak_bytes'])}, {row['difference']:+.2%}, {row['step_seconds']:.3f} s "
        "a step"
    )


def main(arguments: list[str] | None = None) -> None:
    """Run every row and print the table; with `--row`, that one, here."""
    parser = argparse.ArgumentParser(prog="python -m tools.gpu_estimate", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="where the JSON goes")
    parser.add_argument("--small", action="store_true", help="a tiny Llama on the CPU")
    parser.add_argument("--only", default="*", metavar="GLOB", help="rows of such names")
    parser.add_argument("--limit", type=float, default=240, metavar="SECONDS", help="for each row (default: 240)")
    parser.add_argument("--row", choices=ROWS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)

    import torch

    if not options.small and not torch.cuda.is_available():
        parser.error("there is no GPU here; --small runs the rows on the CPU")
    if not (asked := [name for name in ROWS if fnmatchcase(name, options.only)]):
        parser.error(f"--only: {options.only!r} is none of {', '.join(ROWS)}")
    subject = Subject.of(small=options.small)
    if options.row:
        options.out.write_text(json.dumps(measured_row(ROWS[options.row], subject)))
        return
    rows: dict[str, dict[str, Any]] = {}
    result = {
        "machine": machine(subject.device),
        "settings": {"batch": subject.batch, "sequence": subject.sequence, "dtype": "bfloat16", "optimizer": "adamw"},
        "rows": rows,
    }
    for name in asked:
        rows[name] = row_in_a_process(name, small=options.small, limit=options.limit)
        print(line(name, rows[name]), flush=True)
        options.out.write_text(json.dumps(result, indent=1))
    within = [abs(row["difference"]) <= TARGET for row in rows.values() if "difference" in row]
    print(f"{sum(within)} of {len(rows)} rows within {TARGET:.0%}, {len(rows) - len(within)} not measured")


if __name__ == "__main__":
    main()
