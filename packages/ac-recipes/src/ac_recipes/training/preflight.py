"""What can be known before anything is started: that the recipe fits the ranks and that its data can be read."""

from ac_recipes.parallel.config import compile_config
from ac_recipes.parallel.setup import DistributedSetup
from ac_recipes.recipe import Recipe
from ac_recipes.training.batches import BatchPlan
from ac_recipes.training.text import read_documents


def preflight(recipe: Recipe, world_size: int) -> BatchPlan:
    """Refuse what cannot work on `world_size` ranks; returns how a batch is shared among them.

    Raises:
        UsageError: the sizes do not fit the ranks, or the data cannot be read.
    """
    layout = setup_of(recipe).layout(world_size)
    read_documents(recipe.dataset)
    return BatchPlan.of(recipe.step_scheduler, layout.dp)


def setup_of(recipe: Recipe) -> DistributedSetup:
    """What a recipe says of the model's parallelism, checkpointing and compilation."""
    return DistributedSetup(
        config=recipe.distributed, backend=recipe.model.backend, compile=compile_config(recipe.compile)
    )
