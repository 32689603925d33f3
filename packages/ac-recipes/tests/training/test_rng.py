"""The random numbers of a step hang on the seed, the step and the rank, and on nothing that was drawn before."""

import torch

from ac_recipes.training.rng import seed_step


def draw(*of):
    seed_step(*of)
    return torch.rand(4)


def test_a_step_has_random_numbers_of_its_own():
    first = draw(42, 3, 1)
    assert torch.equal(draw(42, 3, 1), first)
    others = [draw(43, 3, 1), draw(42, 4, 1), draw(42, 3, 0), draw(42, 31, 0), draw(2**32 - 1, 3, 1)]
    assert not any(torch.equal(other, first) for other in others)
