"""What can be known before anything is started: that the recipe fits the ranks and that its data can be read."""

from ac_recipes.data.prepare import read_source
from ac_recipes.hub import check_hub
from ac_recipes.pretrained import find_pretrained
from ac_recipes.recipe import Recipe
from ac_recipes.training.batches import BatchPlan
from ac_recipes.training.distributed import DistributedSetup


def preflight(recipe: Recipe, world_size: int) -> BatchPlan:
    """Refuse what cannot work on `world_size` ranks; returns how a batch is shared among them.

    Raises:
        UsageError: the sizes do not fit the ranks, or the data cannot be read.
    """
    DistributedSetup(recipe.distributed).check(world_size)
    for field, name in recipe.pretrained_names():
        check_hub(find_pretrained(name, field).name, "model", field)
    read_source(recipe.dataset)
    if recipe.validation_dataset is not None:
        read_source(recipe.validation_dataset, "validation_dataset")
    return BatchPlan.of(recipe.step_scheduler, world_size)
