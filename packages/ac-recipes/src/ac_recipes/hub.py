"""Whether the Hugging Face hub can be asked for something: found out at once, and said in one line."""

from pathlib import Path
from typing import Literal

from ac_recipes.errors import UsageError

SECONDS = 10


def check_hub(name: str, kind: Literal["model", "dataset"], field: str) -> None:
    """Refuse a `name` that is no local folder, was not downloaded before, and cannot be had from the hub.

    transformers and datasets would find that out as well, after minutes of retries.

    Raises:
        UsageError: with the reason; begins with `field`.
    """
    from huggingface_hub import HfApi, constants

    if Path(name).exists():
        return
    if (Path(constants.HF_HUB_CACHE) / f"{kind}s--{name.replace('/', '--')}").is_dir():
        return
    if constants.HF_HUB_OFFLINE:
        raise UsageError(f"{field}: {name} is no local folder and was not downloaded before, and HF_HUB_OFFLINE is set")
    api = HfApi()
    try:
        (api.model_info if kind == "model" else api.dataset_info)(name, timeout=SECONDS)
    except Exception as error:  # the library's own, and those of whatever HTTP library it uses
        reason = " ".join(str(error).split())[:200]
        raise UsageError(
            f"{field}: {name} is no local folder, and the Hugging Face hub does not give it ({reason}); name a local "
            "folder, or download it where the hub can be reached"
        ) from error
