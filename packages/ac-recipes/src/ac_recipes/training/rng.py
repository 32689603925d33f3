"""The random numbers of one step.

Each step seeds torch's generators by itself, from the recipe's seed, its number and the rank. So a checkpoint holds no
state of generators: any rank can write what all need to go on, and the random numbers of a step are the same whatever
was drawn before it.
"""

import hashlib

import torch


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed torch's generators, of the CPU and of all GPUs, for step `step` (0 first) on `rank`."""
    digest = hashlib.sha256(f"{seed}/{step}/{rank}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "little"))
