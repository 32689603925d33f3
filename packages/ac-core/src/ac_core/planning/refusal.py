"""What is said where no plan is within the budget: by how much, and what would help that is not in use yet."""

from ac_core.advice import FUSED_LOSS, OFFLOADED, Advice, Change, sharded
from ac_core.estimation.assumptions import Setting
from ac_core.estimation.simulate import Simulation
from ac_core.sizes import size_text

_Parts = tuple[str | Change, ...]


def too_small(limit: int, smallest: Simulation, setting: Setting) -> Advice:
    """For a budget of `limit` bytes.

    smallest: the step under the plan with the lowest peak. setting: of that step.
    """
    lasting = sum(smallest.log.before.values())
    said = (
        f"memory_budget: no plan fits into {size_text(limit)}. The smallest peak of any is {size_text(smallest.peak)}, "
        f"{size_text(smallest.peak - limit)} more, in the {smallest.peak_moment}; parameters, optimizer state and "
        f"batch alone are {size_text(lasting)}. Give at least {smallest.peak} bytes"
    )
    remedies = _remedies(smallest.peak_moment, setting)
    return Advice((said, *(part for remedy in remedies for part in (", or ", *remedy))))


def _remedies(moment: str, setting: Setting) -> list[_Parts]:
    """What would lower the peak of that moment, the best first."""
    found: list[_Parts] = []
    if moment == "optimizer step":
        if setting.optimizer not in ("sgd", "none"):  # these have no state
            found.append(("an optimizer with less state",))
        return [*found, _sharded(setting), ("fewer trainable parameters, as with LoRA",)]
    if "loss" in moment:
        if setting.loss != "fused":
            found.append(("a loss that never has all logits (", FUSED_LOSS, ")"))
        return [*found, _fewer_tokens(setting)]
    if setting.offload == "none":
        found.append(("inputs of blocks in host memory (", OFFLOADED, ")"))
    return [*found, _fewer_tokens(setting), _sharded(setting)]


def _fewer_tokens(setting: Setting) -> _Parts:
    return ("shorter sequences" if setting.rows == 1 else "a smaller batch or shorter sequences",)


def _sharded(setting: Setting) -> _Parts:
    change = sharded(setting.strategy, setting.dp_size)
    if change is None:
        return ("more ranks that share parameters and state",)
    return ("parameters and state sharded over ranks (", change, ", or more)" if change.dp_size else ")")
