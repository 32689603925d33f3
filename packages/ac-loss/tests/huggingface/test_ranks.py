"""DDP and FSDP2 on two ranks: the fused loss against the model's own under the same wrapper."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ac_loss import LossConfig
from ac_loss.huggingface import FusedLossError, use_fused_loss

SIZES = {
    "vocab_size": 151,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def model_of(class_name, tied=False, **settings):
    import transformers

    torch.manual_seed(0)
    model_class = getattr(transformers, class_name)
    return model_class(model_class.config_class(**SIZES, tie_word_embeddings=tied, **settings)).train()


def batch(rank):
    ids = torch.randint(3, 151, (2, 12), generator=torch.Generator().manual_seed(rank))
    labels = ids.clone()
    labels[:, : 3 + 5 * rank] = -100  # the ranks have different numbers of labels
    return {"input_ids": ids, "labels": labels, "num_items_in_batch": torch.tensor(14.0)}


def wrap_ddp(model):
    return DistributedDataParallel(model)


def wrap_ddp_static(model):
    return DistributedDataParallel(model, static_graph=True)


def wrap_root(model):
    return _shard(model, model.model.layers[0], model)


def wrap_head_alone(model):
    return _shard(model, model.model.layers[0], model.lm_head, model)


def wrap_head_with_norm(model):
    return _shard(model, [model.model.norm, model.lm_head], model)


def wrap_head_with_embeddings(model):
    return _shard(model, [model.model.embed_tokens, model.lm_head], model)


def wrap_rounded(model):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    fully_shard(model.lm_head, mp_policy=MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.bfloat16))
    return _shard(model, model)


def wrap_tensor_parallel(model):
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    parallelize_module(model.lm_head, mesh, ColwiseParallel())
    return model


def _shard(model, *units):
    from torch.distributed.fsdp import fully_shard

    for unit in units:
        fully_shard(unit)
    return model


def difference(rank, wrap, *, loss_first=True, tied=False, class_name="LlamaForCausalLM", grad_mode="auto", **settings):
    """Relative, of the loss and of the whole gradients after two microbatches; and what became of the logits."""
    results = []
    for fused in (False, True):
        model = model_of(class_name, tied, **settings)
        if fused and loss_first:
            use_fused_loss(model, LossConfig(grad_mode=grad_mode))
        wrapped = globals()[wrap](model)
        if fused and not loss_first:
            use_fused_loss(model, LossConfig(grad_mode=grad_mode))
        for _ in range(2):
            output = wrapped(**batch(rank))
            output.loss.backward()
        gradients = {name: _whole(parameter.grad) for name, parameter in model.named_parameters()}
        results.append((output.loss.detach(), gradients))
    (loss, gradients), (fused_loss, fused_gradients) = results
    away = [((fused_gradients[name] - g).norm() / g.norm()).item() for name, g in gradients.items()]
    return abs(fused_loss - loss).item() / loss.item(), max(away), type(output.logits).__name__


def _whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


CASES = {
    "ddp": {"wrap": "wrap_ddp"},
    "ddp, static graph": {"wrap": "wrap_ddp_static"},
    "fsdp, head in the root": {"wrap": "wrap_root"},
    "fsdp, tied": {"wrap": "wrap_root", "tied": True},
    "fsdp, head alone": {"wrap": "wrap_head_alone"},
    "fsdp, head alone, sharded first": {"wrap": "wrap_head_alone", "loss_first": False},
    "fsdp, head alone, recomputed": {"wrap": "wrap_head_alone", "grad_mode": "recompute"},
    "fsdp, head with the norm": {"wrap": "wrap_head_with_norm"},
    "fsdp, head with tied embeddings": {"wrap": "wrap_head_with_embeddings", "tied": True},
    "fsdp, scale": {"wrap": "wrap_head_alone", "class_name": "CohereForCausalLM", "logit_scale": 0.5},
}


@pytest.mark.parametrize("case", CASES)
def test_two_ranks(case, ranks):
    for loss, gradients, logits in ranks.run(difference, **CASES[case]):
        assert loss < 1e-6
        assert gradients < 1e-5
        assert logits == "LazyLogits"


def refusal(rank, wrap, late):
    """What a forward says, or, if `late`, the request for logits after it."""
    model = model_of("LlamaForCausalLM")
    use_fused_loss(model)
    wrapped = globals()[wrap](model)
    try:
        output = wrapped(**batch(rank))
        if late:
            output.logits.materialize()
    except FusedLossError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("wrap", "late", "message"),
    [
        ("wrap_head_alone", True, "its forward has ended"),
        ("wrap_rounded", False, "rounds the loss to torch.bfloat16"),
        ("wrap_tensor_parallel", False, "the input of its head is a DTensor"),
    ],
)
def test_what_cannot_be_right_is_refused(wrap, late, message, ranks):
    assert all(message in said for said in ranks.run(refusal, wrap=wrap, late=late))
