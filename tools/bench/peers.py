"""torchtitan's and NeMo AutoModel's own functions, applied to the blocks of our model.

Nothing of theirs is here: the packages are imported where they are installed, in an environment of their own.
"""

from importlib import import_module
from types import ModuleType

from torch import nn

from tools.bench.variants import Unavailable, Variant

TORCHTITAN = "torchtitan"
AUTOMODEL = "NeMo AutoModel"
PEERS = (TORCHTITAN, AUTOMODEL)

_AUTOMODEL_MODULE = "nemo_automodel.components.distributed.activation_checkpointing"


def torchtitan(policy: str) -> Variant:
    """`FullAC` or `SelectiveAC` with default settings; it wraps every child of `model.model.layers`."""

    def apply(model: nn.Module) -> None:
        module = _load("torchtitan.distributed.activation_checkpoint")
        kind = {"full": module.FullAC, "selective": module.SelectiveAC}[policy]
        kind(kind.Config()).apply(model.model)

    return Variant(TORCHTITAN, policy, apply)


def automodel(policy: str) -> Variant:
    """What its FSDP2 and single-device paths call for `activation_checkpointing: true` and `selective`."""

    def apply(model: nn.Module) -> None:
        module = _load(_AUTOMODEL_MODULE)
        blocks = list(model.model.layers)
        if policy == "full":
            module.apply_full_layer_checkpointing_to_layers(model, blocks)
        else:
            module.apply_selective_checkpointing_to_layers(model, blocks, has_kv_sharing=False)

    return Variant(AUTOMODEL, policy, apply)


def automodel_without_lookup(policy: str) -> Variant:
    """The same less its search for Transformer Engine, which it repeats in every forward of every block.

    Where that library is missing, each search is a failing import of 0.8 ms, most of this peer's host overhead; where
    it is there, next to nothing. So this is the peer as on a machine that has it: its own contexts, put into torch's
    `checkpoint_wrapper` as it does.
    """

    def apply(model: nn.Module) -> None:
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

        module = _load(_AUTOMODEL_MODULE)
        if policy == "full":
            context_fn = module.sdpa_backend_snapshot_context_fn
        else:
            context_fn = module.make_selective_checkpoint_context_fn()
        blocks = model.model.layers
        for index, block in enumerate(blocks):
            blocks[index] = checkpoint_wrapper(block, context_fn=context_fn)

    return Variant(AUTOMODEL, policy, apply, "without lookup")


def _load(module: str) -> ModuleType:
    try:
        return import_module(module)
    except ImportError as missing:
        if missing.name == module.partition(".")[0]:
            raise Unavailable("peer not installed (docs/benchmarks.md says how)") from missing
        raise Unavailable(f"peer installed without what it imports: {missing}") from missing
