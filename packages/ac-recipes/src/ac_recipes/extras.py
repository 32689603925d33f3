"""The commands that install what is optional, as they work in the environment that we run in.

A hatch environment has no pip, and a package that is installed from a checkout may be on no index.
"""

import json
import os
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlparse


def install(what: str, options: str = "") -> str:
    """The command that installs `what`, a requirement or a path."""
    if "HATCH_ENV_ACTIVE" in os.environ:
        program = "hatch run uv pip"
    else:
        program = "pip" if find_spec("pip") is not None else "uv pip"
    return f"{program} install {f'{options} ' * bool(options)}{what}"


def install_extra(extra: str, package: str = "ac-recipes") -> str:
    """The command that adds the extra `extra` to one of our packages, from where that was installed."""
    folder, options = _folder(package)
    return install(f"'{folder or package}[{extra}]'", options)


def _folder(package: str) -> tuple[str, str]:
    """The folder that `package` was installed from, and the option to install it from there in the same way; empty if
    it came from an index. `direct_url.json` is what installers write down of that (PyPA's "Direct URL" specification).
    """
    from importlib import metadata  # slow to load, and asked only where something is missing

    try:
        text = metadata.distribution(package).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return "", ""
    origin = json.loads(text) if text else {}
    url = urlparse(origin.get("url", ""))
    if url.scheme != "file" or "dir_info" not in origin:
        return "", ""
    folder = Path(unquote(url.path))
    here = Path.cwd()
    shown = f"./{folder.relative_to(here)}" if folder.is_relative_to(here) else str(folder)
    return shown, "-e" * bool(origin["dir_info"].get("editable"))
