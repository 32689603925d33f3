import pytest
import torch
from torch import nn

from ac_core import ActivationCheckpointingError, find_blocks
from ac_core.estimation.batches import text_batch


def test_tokens_of_the_vocabulary_without_padding(decoder):
    model = decoder(depth=2)
    batch = text_batch(model, find_blocks(model), 3, 1000)
    assert {name: (tuple(value.shape), value.dtype) for name, value in batch.items()} == {
        "input_ids": ((3, 1000), torch.int64),
        "labels": ((3, 1000), torch.int64),
    }
    assert batch["input_ids"].max() == 511


def test_a_model_with_other_parts_wants_a_batch_of_its_own(decoder):
    class Seeing(decoder):
        def __init__(self):
            super().__init__(depth=2)
            self.vision_tower = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(2))

    model = Seeing()
    with pytest.raises(ActivationCheckpointingError, match=r"^batch: Seeing also has the parts vision"):
        text_batch(model, find_blocks(model), 1, 8)
