"""Time, memory and accuracy of ac_loss beside plain cross-entropy and its peers, on a CPU, in one process.

python -m tools.bench_loss                  # everything that docs/loss-benchmarks.md shows
python -m tools.bench_loss time --dtype bf16 --only 'ours*'
"""
