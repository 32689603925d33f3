"""Peak memory is what was held at once in the interval, and starts over with each reading."""

import torch

from ac_recipes.training.memory import PeakMemory

MIB = 2**20


def test_a_large_tensor_shows_in_its_interval_only():
    memory = PeakMemory(torch.device("cpu"))
    quiet = memory.read()
    held = torch.ones(64 * MIB)  # 256 MiB
    del held
    assert memory.read() > quiet + 200 * MIB
    assert memory.read() < quiet + 100 * MIB, memory.source
