"""`torch.compile`, block by block."""

from torch import nn

from ac_core import find_blocks
from ac_recipes.parallel.config import CompileConfig


def compile_blocks(model: nn.Module, config: CompileConfig) -> int:
    """Compile every block of `model`, in place, and return how many. State-dict keys stay as they are.

    Blocks and not the model: they are alike and share one compilation, and FSDP2 gathers a block at a time.
    """
    blocks = find_blocks(model)
    options = {"fullgraph": config.fullgraph, "dynamic": config.dynamic, "backend": config.backend}
    if config.backend == "inductor" and config.mode != "default":
        options["mode"] = config.mode
    for block in blocks:
        block.module.compile(**options)
    return len(blocks)
