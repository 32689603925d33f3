"""What can be known before anything is started: that the recipe fits the ranks and that its data can be read."""

from ac_recipes.data.prepare import read_source
from ac_recipes.errors import UsageError
from ac_recipes.hub import check_hub
from ac_recipes.installed import check_installed
from ac_recipes.parallel.config import compile_config
from ac_recipes.parallel.setup import DistributedSetup
from ac_recipes.pretrained import find_pretrained
from ac_recipes.recipe import Recipe
from ac_recipes.trackers import check_trackers
from ac_recipes.training.batches import BatchPlan
from ac_recipes.training.loss import check_backend
from ac_recipes.training.ranks import local_device


def preflight(recipe: Recipe, world_size: int) -> BatchPlan:
    """Refuse what cannot work on `world_size` ranks; returns how a batch is shared among them.

    Raises:
        UsageError: the sizes do not fit the ranks, a package is missing, the loss cannot be computed here, the data
            cannot be read, or checkpoints are asked for that no run could go on from.
    """
    check_installed(recipe)
    check_trackers(recipe)
    check_backend(recipe, local_device())
    layout = setup_of(recipe).layout(world_size)
    if recipe.distributed.strategy == "megatron_fsdp" and layout.dp > 1 and recipe.checkpoint.enabled:
        raise UsageError(
            "checkpoint.enabled: with strategy 'megatron_fsdp' the optimizer's state is not restored exactly, so a run "
            "could not go on from its checkpoints; set it to false, and the run keeps its figures and no weights, or "
            "use strategy 'fsdp2'"
        )
    for field, name in recipe.pretrained_names():
        check_hub(find_pretrained(name, field).name, "model", field)
    read_source(recipe.dataset)
    if recipe.validation_dataset is not None:
        read_source(recipe.validation_dataset, "validation_dataset")
    return BatchPlan.of(recipe.step_scheduler, layout.dp)


def setup_of(recipe: Recipe) -> DistributedSetup:
    """What a recipe says of the model's parallelism, checkpointing and compilation."""
    return DistributedSetup(
        config=recipe.distributed, backend=recipe.model.backend, compile=compile_config(recipe.compile)
    )
