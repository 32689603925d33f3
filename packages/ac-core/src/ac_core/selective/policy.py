"""The policy as `apply` uses it: what to keep in a set of blocks, checked before anything is changed."""

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import get_args

from torch import nn

from ac_core.choice import Region
from ac_core.config import FamilyName
from ac_core.errors import ActivationCheckpointingError
from ac_core.region.contexts import ContextFn
from ac_core.report import names_text
from ac_core.selective.compiled import compiled_contexts
from ac_core.selective.context import KeptCalls
from ac_core.selective.names import NamedCalls
from ac_core.selective.ops import check_op_name
from ac_core.selective.plan import BlockPlan, ModelPlan, is_list
from ac_core.selective.rule import SaveRule
from ac_core.selective.sites import attach_sites


class SelectiveCalls:
    """Selective checkpointing of the regions of one model, each by its own rule.

    notes: what is not kept everywhere.
    """

    def __init__(self, regions: Sequence[Region], named: NamedCalls, notes: Sequence[str]) -> None:
        self.notes = tuple(notes)
        self._regions = {region.name: region for region in regions}
        # One budget for each part: a tower does not spend what the language model leaves over.
        self._plans = {(region.block.part, region.dormant): ModelPlan(named) for region in regions}
        self._of = {region.name: self._add(region) for region in regions}

    def attach(self, name: str) -> list[tuple[ContextFn, ContextFn]]:
        """Prepare the modules inside the region called `name`. The context functions to checkpoint it with, in eager
        mode and where torch.compile traces it; none if the region has no rule."""
        region = self._regions.get(name)
        if region is None:
            return []
        attach_sites(region.module, self._of[name])
        kept = KeptCalls(self._plan(region), self._of[name], region.module)
        return [(kept, compiled_contexts(self._of[name].rule))]

    def _add(self, region: Region) -> BlockPlan:
        piece_of = None if region.module is region.block.module else region.block.name
        return self._plan(region).add(region.name, region.module, region.rule, piece_of=piece_of)

    def _plan(self, region: Region) -> ModelPlan:
        return self._plans[region.block.part, region.dormant]


def select_calls(regions: Sequence[Region], field: str = "save", *, strict: bool = True) -> SelectiveCalls:
    """The policy for those of `regions` that have a rule.

    Args:
        regions: in model order.
        field: the setting that the rules come from. A name in `save` has to fit something in any region; what a `plan`
            says of a block, in that block.
        strict: raise as well where a step shows that a family or an op fits no call.

    Raises:
        ActivationCheckpointingError: a name that fits nothing; a region, or a module in one, that is compiled already.
    """
    ruled = [region for region in regions if region.rule is not None]
    for each in [[region] for region in ruled] if field == "plan" else [ruled]:
        for rule in dict.fromkeys(region.rule for region in each):
            if problem := next(_misfits(rule, each), None):
                raise ActivationCheckpointingError(f"{field}: {problem}")
    for region in ruled:
        _refuse_compiled(region)
    return SelectiveCalls(ruled, NamedCalls(field, strict), _partly_there(ruled) if field == "save" else ())


def _refuse_compiled(region: Region) -> None:
    for path, module in region.module.named_modules():
        if _is_compiled(module, itself=not path):
            name = f"{region.name}.{path}" if path else region.name
            raise ActivationCheckpointingError(
                f"'{name}' is compiled already, so that its calls cannot be kept one by one and 'selective' would "
                "silently become 'full'; compile whole blocks (block.compile()) or the model instead: that keeps "
                "what the policy says"
            )


def _is_compiled(module: nn.Module, *, itself: bool) -> bool:
    """Whether the compiler traces this module from inside of the region. `Module.compile` on the region's own module
    traces it from outside, checkpointing and all."""
    if hasattr(module.__dict__.get("forward"), "_torchdynamo_orig_callable"):
        return True
    return not itself and module._compiled_call_impl is not None


def _partly_there(regions: Sequence[Region]) -> Iterator[str]:
    """For each glob that some blocks have no module for: a note that says which."""
    blocks: dict[str, list[Region]] = {}
    for region in regions:
        blocks.setdefault(region.block.name, []).append(region)
    for glob in dict.fromkeys(glob for region in regions for glob in region.rule.globs):
        without = [name for name, own in blocks.items() if not any(_fits(glob, *path) for path in _modules(own))]
        if without:
            yield (
                f"save: {glob!r} matches no module in {len(without)} of {len(blocks)} blocks, which keep nothing for "
                f"it: {names_text(without)}"
            )


def _modules(regions: Sequence[Region]) -> Iterator[tuple[str, str]]:
    """The region and the path in it of each module that a glob can name."""
    for region in regions:
        yield from ((region.name, p) for p, module in region.module.named_modules() if p and not is_list(module))


def _fits(glob: str, region: str, path: str) -> bool:
    return SaveRule(globs=(glob,)).keeps_module(region, path)


def _misfits(rule: SaveRule, regions: Sequence[Region]) -> Iterator[str]:
    """What is wrong with each name in the rule that names nothing, in these regions if it is a glob."""
    yield from filter(None, (check_op_name(op, imported=True) for op in sorted(rule.ops)))
    paths = list(_modules(regions))
    for glob in rule.globs:
        if not any(_fits(glob, *path) for path in paths):
            where = f"block '{regions[0].name}'" if len(regions) == 1 else "the checkpointed blocks"
            close = get_close_matches(glob, (*get_args(FamilyName), *sorted({path for _, path in paths})), n=3)
            hint = f"; near matches: {', '.join(map(repr, close))}" if close else ""
            yield f"{glob!r} is no family and matches no module in {where}{hint}"
