"""Activation checkpointing side by side with its peers: time, memory and host overhead, in one process.

    python -m tools.bench full --shape d512           # whole blocks: ours, Hugging Face's, torch's wrapper, the peers'
    python -m tools.bench selective --shape d512      # ours against torchtitan's and NeMo AutoModel's
    python -m tools.bench host                        # milliseconds of Python per block and step, on a tiny shape

Run from the root of the repository, in an environment that holds ac-core and transformers. The peers are used where
they are installed and named as missing where they are not; docs/benchmarks.md says how to install them and how to read
the tables.
"""
