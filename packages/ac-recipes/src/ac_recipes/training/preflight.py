"""What can be known before anything is started: that the recipe fits the ranks and that its data can be read."""

from ac_recipes.recipe import Recipe
from ac_recipes.trackers import check_trackers
from ac_recipes.training.batches import BatchPlan
from ac_recipes.training.distributed import DistributedSetup
from ac_recipes.training.text import read_documents


def preflight(recipe: Recipe, world_size: int) -> BatchPlan:
    """Refuse what cannot work on `world_size` ranks; returns how a batch is shared among them.

    Raises:
        UsageError: the sizes do not fit the ranks, a package is missing, or the data cannot be read.
    """
    check_trackers(recipe)
    DistributedSetup(recipe.distributed).check(world_size)
    read_documents(recipe.dataset)
    return BatchPlan.of(recipe.step_scheduler, world_size)
