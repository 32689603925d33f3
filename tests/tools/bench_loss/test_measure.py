import torch
from torch import Tensor

from tools.bench_loss.contestants import plain, three_gemms
from tools.bench_loss.measure import Inputs, paired, peak_bytes, seconds, weight_gradient_error

TOKENS, WIDTH, VOCAB = 64, 16, 512
LOGITS = TOKENS * VOCAB * 4


def inputs(dtype: torch.dtype = torch.float32, **options: float) -> Inputs:
    return Inputs(TOKENS, WIDTH, VOCAB, dtype, **options)


def test_the_peak_counts_what_is_alive_at_once_and_not_the_gradients():
    def keeps_logits(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return three_gemms(hidden, weight, labels)

    slack = 4096
    assert LOGITS <= peak_bytes(inputs(), keeps_logits) <= LOGITS + slack
    assert peak_bytes(inputs(), plain) >= 2 * LOGITS  # logits and their gradient


def test_half_of_the_labels_are_ignored():
    assert (inputs(ignored=0.5).labels == -100).sum() == TOKENS // 2


def test_the_error_is_that_of_the_weights_gradient():
    assert weight_gradient_error(inputs(), plain) == 0

    def doubled(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return 2 * plain(hidden, weight, labels)

    assert abs(weight_gradient_error(inputs(), doubled) - 1) < 1e-6
    assert 1e-4 < weight_gradient_error(inputs(torch.bfloat16), plain) < 1e-2


def test_times_are_compared_round_by_round():
    times = seconds(inputs(), {"plain": plain, "again": plain}, rounds=3, progress=lambda number: None)
    assert [len(rounds) for rounds in times.values()] == [3, 3]
    assert paired({"plain": [1.0, 2.0, 4.0], "x": [2.0, 4.0, 4.0]}, "x") == 2.0
