"""What ac_moe's recompute cache saves of a training step, beside what arithmetic predicts, on several ranks.

    python -m tools.bench_moe                    # 2 CPU ranks over gloo: the tables of docs/moe-benchmarks.md
    python -m tools.bench_moe --device cuda      # one rank for each GPU over NCCL, bfloat16

It starts the ranks itself, and ends them. Run it from the root of the repository.
"""
