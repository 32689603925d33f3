"""A Hugging Face model on two ranks."""

import pytest
import torch
from ac_core_cases import ddp, sharded, sharded_bf16
from ac_core_decoder import HEADS, HIDDEN, KEY_HEADS, VOCABULARY, WIDTH
from ac_core_training import Case, Outcome, outcomes
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")


class Llama(nn.Module):
    """`forward(ids, labels)` returns the loss, as that of `Decoder` does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=HIDDEN,
            num_hidden_layers=2,
            num_attention_heads=HEADS,
            num_key_value_heads=KEY_HEADS,
        )
        self.model = transformers.LlamaForCausalLM(config)

    @property
    def layers(self) -> nn.ModuleList:
        return self.model.model.layers

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.model(input_ids=ids, labels=labels).loss


STRATEGIES = {"fsdp2": sharded, "fsdp2, bf16": sharded_bf16, "ddp": ddp}


def train(rank: int, strategy: str) -> dict[str, Outcome]:
    return outcomes(rank, Case(STRATEGIES[strategy], build=Llama))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_numbers_are_those_without_checkpointing(ranks, strategy):
    for outcome in ranks.run(train, strategy=strategy):
        none, full, selective = outcome["none"], outcome["full"], outcome["selective"]
        assert full.different == [] == selective.different
        assert none.matmuls < selective.matmuls < full.matmuls
        assert full.saved < selective.saved < none.saved
        assert full.collectives == none.collectives == selective.collectives
