"""Where a recipe is: a path, or the name of one that this package ships."""

import re
from difflib import get_close_matches
from pathlib import Path

from ac_recipes.errors import UsageError

SHIPPED = Path(__file__).parent / "recipes"


def shipped_names() -> list[str]:
    """Names of the shipped recipes."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def find_recipe(name_or_path: str) -> Path:
    """The file of a recipe. A path that exists wins over a shipped name.

    Raises:
        UsageError: there is no such file and no such shipped recipe.
    """
    if not name_or_path:
        raise UsageError(f"the name of the recipe is empty; give a file, or one of {', '.join(shipped_names())}")
    path = Path(name_or_path)
    if path.is_file():
        return path
    names = shipped_names()
    if name_or_path in names:
        return SHIPPED / f"{name_or_path}.yaml"
    if re.match(r"-?\w+(\.\w+)+=", name_or_path):
        raise UsageError(f"{name_or_path} is no recipe; to override a field, write --{name_or_path.lstrip('-')}")
    near = get_close_matches(name_or_path, names, n=1)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    what = "is a folder, not a recipe" if path.is_dir() else "is neither a file nor a shipped recipe"
    raise UsageError(f"{name_or_path} {what}; shipped: {', '.join(names)}{hint}")
