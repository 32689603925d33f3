"""Recipes of NeMo AutoModel, read as they are.

    translator = Translator()
    recipe = read_recipe(Recipe, "squad.yaml", rewrite=translator)     # every mistake with its place in squad.yaml
    print(written(translator, "squad.yaml"))                           # the same recipe in our own words

`table` says, a section at a time, what each key and each known `_target_` means here; `rules` are the words it says it
with; `defaults` adds what AutoModel takes where a recipe is silent; `translator` walks the tree; `write` prints it.

A key that the table does not name goes through under its own name, and the strict reader decides: so a field that a
section of ours gains needs no line here, unless it means another thing there. What a recipe says about checkpointing,
its scope, the loss, the dispatcher and the experts is kept or refused, and never left out.
"""

from ac_recipes.automodel.translator import Translator
from ac_recipes.automodel.write import left_out_text, written

__all__ = ["Translator", "left_out_text", "written"]
