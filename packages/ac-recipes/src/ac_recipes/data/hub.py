"""Datasets of Hugging Face, by name or from a folder (extra `datasets`)."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ac_recipes.data.config import RecordsDatasetConfig
from ac_recipes.errors import UsageError
from ac_recipes.extras import install_extra
from ac_recipes.hub import check_hub


def load_hub_dataset(source: str, config: RecordsDatasetConfig, field: str) -> Iterable[dict[str, Any]]:
    """The rows of the dataset `source`: a name on the hub, a folder of data files, or one that `save_to_disk` wrote.

    Raises:
        UsageError: `datasets` is not installed, or the dataset cannot be had; begins with `field`.
    """
    try:
        import datasets
    except ImportError as error:
        raise UsageError(
            f"{field}: {source!r} is no file (.jsonl, .json, .yml), so it is a Hugging Face dataset, which needs the "
            f"datasets library; {install_extra('datasets')}"
        ) from error
    check_hub(source, "dataset", field)
    try:
        if (Path(source) / "dataset_dict.json").is_file() or (Path(source) / "state.json").is_file():
            loaded = datasets.load_from_disk(source)
            return loaded[config.split] if isinstance(loaded, datasets.DatasetDict) else loaded
        return datasets.load_dataset(source, config.name, split=config.split)
    except Exception as error:  # the library raises of every kind
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:240]}"
        raise UsageError(f"{field}: the dataset {source} cannot be loaded: {reason}") from error
