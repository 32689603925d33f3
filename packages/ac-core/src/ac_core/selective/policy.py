"""The policy as `apply` uses it: what to keep in a set of blocks, checked before anything is changed."""

from collections.abc import Sequence
from difflib import get_close_matches
from typing import get_args

from torch import nn

from ac_core.choice import Region
from ac_core.config import FamilyName
from ac_core.errors import ActivationCheckpointingError
from ac_core.selective.compiled import compiled_contexts
from ac_core.selective.context import KeptCalls
from ac_core.selective.ops import check_op_name
from ac_core.selective.plan import ModelPlan, is_list
from ac_core.selective.rule import SaveRule
from ac_core.selective.sites import attach_sites


class SelectiveCalls:
    """Selective checkpointing of the regions of one model.

    compiled: the context function for a region that torch.compile traces.
    """

    def __init__(self, regions: Sequence[Region], rule: SaveRule) -> None:
        self._regions = {region.name: region for region in regions}
        # One budget for each part: a tower does not spend what the language model leaves over.
        self._plans = {(region.block.part, region.dormant): ModelPlan(rule) for region in regions}
        self._of = {region.name: self._plan(region).add(region.name, region.module) for region in regions}
        self.compiled = compiled_contexts(rule)

    def attach(self, name: str) -> KeptCalls:
        """Prepare the modules inside the region called `name`; the context function to checkpoint it with."""
        region = self._regions[name]
        attach_sites(region.module, self._of[name])
        return KeptCalls(self._plan(region), self._of[name], region.module)

    def _plan(self, region: Region) -> ModelPlan:
        return self._plans[region.block.part, region.dormant]


def select_calls(regions: Sequence[Region], save: Sequence[str] | None) -> SelectiveCalls:
    """The policy for `regions` under the `save` setting.

    Raises:
        ActivationCheckpointingError: a name in `save` that fits nothing in these regions; a region, or a module in
            one, that is compiled already.
    """
    for name in save or ():
        if "::" in name:
            problem = check_op_name(name, imported=True)
        elif name in get_args(FamilyName):
            problem = None
        else:
            problem = _no_module(name, regions)
        if problem:
            raise ActivationCheckpointingError(f"save: {problem}")
    for region in regions:
        for path, module in region.module.named_modules():
            if _is_compiled(module, itself=not path):
                name = f"{region.name}.{path}" if path else region.name
                raise ActivationCheckpointingError(
                    f"'{name}' is compiled already, so that its calls cannot be kept one by one and 'selective' would "
                    "silently become 'full'; compile whole blocks (block.compile()) or the model instead: that keeps "
                    "what the policy says"
                )
    return SelectiveCalls(regions, SaveRule.of(save))


def _is_compiled(module: nn.Module, *, itself: bool) -> bool:
    """Whether the compiler traces this module from inside of the region. `Module.compile` on the region's own module
    traces it from outside, checkpointing and all."""
    if hasattr(module.__dict__.get("forward"), "_torchdynamo_orig_callable"):
        return True
    return not itself and module._compiled_call_impl is not None


def _no_module(glob: str, regions: Sequence[Region]) -> str | None:
    paths = [(region.name, p) for region in regions for p, m in region.module.named_modules() if p and not is_list(m)]
    rule = SaveRule.of((glob,))
    if any(rule.keeps_module(name, path) for name, path in paths):
        return None
    close = get_close_matches(glob, (*get_args(FamilyName), *sorted({path for _, path in paths})), n=3)
    hint = f"; near matches: {', '.join(map(repr, close))}" if close else ""
    return f"{glob!r} is no family and matches no module in the checkpointed blocks{hint}"
