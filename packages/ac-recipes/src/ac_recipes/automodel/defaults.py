"""What AutoModel does where a recipe is silent and ac-recipes would do something else, written out."""

from ac_recipes.automodel.rules import Translation, is_text
from ac_recipes.reader.mistakes import KeyPath
from ac_recipes.reader.nodes import Entry, MapNode, ScalarNode, node_of
from ac_recipes.reader.scalars import NUMBERS, kind_of

_UNBOUNDED = 1_000_000_000
"""Steps that `num_epochs` alone ends; AutoModel takes 2^63 - 1."""


def add_defaults(translation: Translation, root: MapNode) -> None:
    """Put AutoModel's defaults where the recipe says nothing. They stand at the section, or at the top of the file."""
    _learning_rate(translation, root)
    _steps(translation, root)
    _dtype(translation, root)
    if not is_text(translation.get("optimizer", "weight_decay"), "0") and translation.has("optimizer", "weight_decay"):
        reason = "norms and biases are not decayed; AutoModel decays them too"
        translation.note(root.entries["optimizer"].key_place, ("optimizer", "weight_decay"), "above 0", reason)


def _dtype(translation: Translation, root: MapNode) -> None:
    if not translation.has("model"):
        return
    place = root.entries["model"].key_place
    if not translation.has("model", "dtype"):
        _put(translation, root, ("model", "dtype"), "bfloat16")
        reason = "is the checkpoint's in AutoModel, and FSDP2 computes in bfloat16 there; bfloat16 is written"
        translation.note(place, ("model", "torch_dtype"), "not given", reason)
    elif is_text(translation.get("model", "dtype"), "float32"):
        reason = "all is computed in float32; AutoModel's FSDP2 computes in bfloat16"
        translation.note(place, ("model", "torch_dtype"), "float32", reason)


def _learning_rate(translation: Translation, root: MapNode) -> None:
    if "lr_scheduler" not in root.entries:
        _put(translation, root, ("lr_scheduler", "lr_decay_style"), "constant")
        return
    peak = _number(translation.get("optimizer", "lr"))
    if not translation.has("lr_scheduler", "min_lr") and peak is not None:
        _put(translation, root, ("lr_scheduler", "min_lr"), float(f"{peak * 0.01:.9g}"))
    if not translation.has("lr_scheduler", "lr_warmup_steps"):
        _put(translation, root, ("lr_scheduler", "lr_warmup_steps"), "auto")
    if not is_text(translation.get("lr_scheduler", "lr_warmup_steps"), "0"):
        place = root.entries["lr_scheduler"].key_place
        reason = "the warm-up begins at 0; AutoModel's at a tenth of lr"
        translation.note(place, ("lr_scheduler", "init_lr"), "not given", reason)


def _steps(translation: Translation, root: MapNode) -> None:
    if translation.has("step_scheduler", "max_steps"):
        return
    if not translation.has("step_scheduler", "num_epochs"):
        _put(translation, root, ("step_scheduler", "num_epochs"), 10)
    _put(translation, root, ("step_scheduler", "max_steps"), _UNBOUNDED)


def _put(translation: Translation, root: MapNode, path: KeyPath, value: object) -> None:
    place = root.entries[path[0]].key_place if path[0] in root.entries else root.place
    translation.put(path, Entry(place, node_of(value, place)))


def _number(node: object) -> float | None:
    if isinstance(node, ScalarNode) and node.plain and kind_of(node.text) in NUMBERS:
        return float(node.text)
    return None
