"""Whether the plan that a recipe holds is for the step that it would train. Loads without torch."""

from typing import TYPE_CHECKING, Any, TypedDict

from ac_core.sizes import counted

if TYPE_CHECKING:
    from ac_recipes.recipe import Recipe

_FIELD = "distributed.activation_checkpointing"


class PlannedFor(TypedDict):
    """What `planned_for` says beside a plan: the budget, and the step of one rank that fits into it.

    local_batch_size: rows of one forward, of `row_length` tokens. ranks: that hold different batches.
    """

    memory_budget: str | int | float
    local_batch_size: int
    row_length: int
    ranks: int


def planned_for(recipe: "Recipe", budget: str | int | float) -> PlannedFor:
    """What a plan for the recipe's step within `budget` is made for."""
    ranks = recipe.distributed.dp_size or recipe.distributed.ep_size
    return {"memory_budget": budget, "ranks": ranks, **_step(recipe, ranks)}


def check_planned(recipe: "Recipe", ranks: int | None = None) -> None:
    """Refuse a plan that was made for a smaller step: the recipe's might take more than the budget.

    Args:
        ranks: that the recipe trains on; `None`: `distributed.dp_size`, or where that is open as many as were planned
            for.

    Raises:
        ValueError: naming the field, what the plan was made for, and the remedies.
    """
    config, said = recipe.distributed.checkpointing, _said(recipe)
    if config.memory_budget is None or said is None:
        return
    ranks = ranks or recipe.distributed.dp_size or said["ranks"]
    remedy = f"leave the plan out ({_FIELD}.plan: null), and one is made for this, or set it back"
    step = _step(recipe, ranks)
    packed = recipe.packed_sequence.packed_sequence_size > 0
    fields = {
        "local_batch_size": "step_scheduler.local_batch_size",
        "row_length": "packed_sequence.packed_sequence_size" if packed else "dataset.sequence_length",
    }
    for name, field in fields.items():
        if step[name] > said[name]:
            raise ValueError(
                f"{field}: the plan in {_FIELD} is for {_text(said)}, and a step has {_text(step)}: it might take more "
                f"than the memory_budget; {remedy}"
            )
    if ranks < said["ranks"] and recipe.distributed.strategy == "fsdp2":
        raise ValueError(
            f"distributed.dp_size: the plan in {_FIELD} is for shares of {counted(said['ranks'], 'rank')}, and those "
            f"of {ranks} are larger: a step might take more than the memory_budget; {remedy}"
        )


def planned_text(recipe: "Recipe", ranks: int) -> str:
    """What is known of what the recipe's plan was made for, beside a run on `ranks` ranks. In words."""
    said = _said(recipe)
    if said is None:
        return "the plan does not say which batch it was made for"
    step = {**_step(recipe, ranks), "ranks": ranks}
    here = "" if all(said[name] == step[name] for name in step) else f"; here {_text(step)} on {ranks}"
    return f"the plan is for {_text(said)} a rank, on {counted(said['ranks'], 'rank')}{here}"


def _step(recipe: "Recipe", ranks: int) -> dict[str, int]:
    share = max(1, recipe.step_scheduler.global_batch_size // ranks)
    return {
        "local_batch_size": min(recipe.step_scheduler.local_batch_size, share),
        "row_length": recipe.row_length,
    }


def _said(recipe: "Recipe") -> dict[str, Any] | None:
    """What the recipe's plan was made for, where that is a step."""
    said = recipe.distributed.checkpointing.planned_for or {}
    known = all(type(said.get(name)) is int and said[name] >= 1 for name in ("local_batch_size", "row_length", "ranks"))
    return said if known else None


def _text(step: dict[str, Any]) -> str:
    return f"{step['local_batch_size']} x {step['row_length']} tokens"
