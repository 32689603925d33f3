"""What the recipes keep and compute on the device of this machine, with and without checkpointing and fused loss.

    hatch run python tools/gpu_check.py --out gpu.json            # on a GPU: Llama-3.2-1B's shape, bf16, 8 x 2048
    hatch run python tools/gpu_check.py --out cpu.json --small    # the same table of a tiny model, anywhere

Runs `ac-recipes train` once for every row, in a process of its own, and writes the losses, the peak memory and the
seconds of each step. Then the loss by itself, every backend beside its peers (`tools/gpu_loss.py`, also in a process of
its own). Needs torch and transformers alone, so that it also runs from a checkout, without an install:
`PYTHONPATH=packages/ac-core/src:packages/ac-loss/src:packages/ac-moe/src:packages/ac-recipes/src`.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

LLAMA_3_2_1B = {
    "model.config": "{model_type: llama, hidden_size: 2048, intermediate_size: 8192, num_hidden_layers: 16, "
    "num_attention_heads: 32, num_key_value_heads: 8, head_dim: 64, vocab_size: 128256, "
    "max_position_embeddings: 2048, tie_word_embeddings: true}",
    "model.dtype": "bfloat16",
    "dataset.sequence_length": "2048",
    "step_scheduler.global_batch_size": "8",
    "step_scheduler.local_batch_size": "8",
    "optimizer.lr": "1e-4",
}
TINY = {
    "model.config": "{model_type: llama, hidden_size: 64, intermediate_size: 96, num_hidden_layers: 2, "
    "num_attention_heads: 4, vocab_size: 4096}",
    "dataset.sequence_length": "64",
}
ROWS = {
    "none, plain loss": ("false", "plain"),
    "full, plain loss": ("true", "plain"),
    "none, fused loss": ("false", "fused"),
    "full, fused loss": ("true", "fused"),
}


def run(overrides: dict[str, str], folder: Path) -> dict[str, object]:
    """One training run: losses, peak bytes and seconds of its steps; or the end of what it said when it failed."""
    settings = {"run.dir": str(folder), "checkpoint.enabled": "false", **overrides}
    flags = [f"--{name}={value}" for name, value in settings.items()]
    done = subprocess.run(
        [sys.executable, "-m", "ac_recipes", "train", "default", "--json", *flags],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        return {"failed": done.stderr[-2000:]}
    metrics = Path(json.loads(done.stdout)["run"]) / "metrics.jsonl"
    steps = [line for line in map(json.loads, metrics.read_text().splitlines()) if "loss" in line]
    return {
        "losses": [line["loss"] for line in steps],
        "grad_norms": [line["grad_norm"] for line in steps],
        "peak_bytes": max(line["peak_bytes"] for line in steps),
        "median_step_seconds": statistics.median(line["seconds"] for line in steps[1:]),
        "shown": done.stderr.splitlines(),
    }


def loss(folder: Path, *, small: bool) -> dict[str, object]:
    """What `tools/gpu_loss.py` finds, printed as it goes."""
    out = folder / "loss.json"
    flags = ["--out", str(out), *(["--small", "--rounds", "1"] if small else [])]
    done = subprocess.run([sys.executable, str(Path(__file__).with_name("gpu_loss.py")), *flags], check=False)
    return json.loads(out.read_text()) if done.returncode == 0 else {"failed": f"exit status {done.returncode}"}


def main() -> None:
    """Run every row and print the table."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="where the JSON goes")
    parser.add_argument("--small", action="store_true", help="a tiny model")
    parser.add_argument("--steps", default="8")
    options = parser.parse_args()
    base = {**(TINY if options.small else LLAMA_3_2_1B), "step_scheduler.max_steps": options.steps}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    result = {"device": device, "torch": torch.__version__, "settings": base, "rows": {}}
    with tempfile.TemporaryDirectory() as folder:
        result["loss"] = loss(Path(folder), small=options.small)
        for name, (checkpointing, kind) in ROWS.items():
            policy = {"distributed.activation_checkpointing": checkpointing, "loss_fn.kind": kind}
            row = run({**base, **policy}, Path(folder))
            result["rows"][name] = row
            options.out.write_text(json.dumps(result, indent=1))
            if "failed" in row:
                print(f"{name}: failed\n{row['failed']}")
            else:
                print(
                    f"{name}: peak {row['peak_bytes'] / 2**30:.2f} GiB ({row['peak_bytes'] / 1e9:.2f} GB), "
                    f"{row['median_step_seconds']:.3f} s a step, last loss {row['losses'][-1]:.6f}"
                )
    rows = result["rows"]
    for kind in ("plain", "fused"):
        pair = [rows[f"{policy}, {kind} loss"].get("losses") for policy in ("none", "full")]
        print(f"{kind} loss: losses with and without checkpointing are bit-equal: {pair[0] == pair[1]}")


if __name__ == "__main__":
    main()
