"""What can be known before anything is started: that the recipe fits the ranks and that its data can be read."""

from ac_recipes.data.prepare import read_source
from ac_recipes.recipe import Recipe
from ac_recipes.training.batches import BatchPlan
from ac_recipes.training.distributed import DistributedSetup


def preflight(recipe: Recipe, world_size: int) -> BatchPlan:
    """Refuse what cannot work on `world_size` ranks; returns how a batch is shared among them.

    Raises:
        UsageError: the sizes do not fit the ranks, or the data cannot be read.
    """
    DistributedSetup(recipe.distributed).check(world_size)
    read_source(recipe)
    return BatchPlan.of(recipe.step_scheduler, world_size)
