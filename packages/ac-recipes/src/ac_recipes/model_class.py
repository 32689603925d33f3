"""Which of transformers' auto classes builds the model of a configuration."""

from typing import Any

from ac_recipes.errors import UsageError


def auto_class(config: Any) -> Any:
    """`AutoModelForCausalLM` or `AutoModelForImageTextToText`, for transformers' configuration object `config`.

    The configuration of a checkpoint names the class that its weights are of (`architectures`), and that decides. With
    new weights, a model that can read images is one that does.

    Raises:
        UsageError: the model is neither a language model nor a vision-language model.
    """
    found = _classes(config)
    named = getattr(config, "architectures", None)
    if not named:
        if found:
            return next(iter(found))
        raise UsageError(f"transformers has neither a language model nor a vision-language model {config.model_type!r}")
    for auto, classes in found.items():
        if classes & set(named):
            return auto
    names = sorted(name for classes in found.values() for name in classes)
    remedy = f"; this version trains {' and '.join(names)} of {config.model_type!r}" if names else ""
    raise UsageError(f"{', '.join(named)} is neither a language model nor a vision-language model{remedy}")


def reads_images(config: Any) -> bool:
    """Whether the model of a configuration is a vision-language model."""
    from transformers import AutoModelForImageTextToText

    try:
        return auto_class(config) is AutoModelForImageTextToText
    except UsageError:  # whoever builds it is told
        return False


def _classes(config: Any) -> dict[Any, set[str]]:
    """By auto class, the names of those classes that it may build from the configuration."""
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
    )

    found = {}
    for auto, mapping in (
        (AutoModelForImageTextToText, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING),
        (AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING),
    ):
        if type(config) in mapping:
            classes = mapping[type(config)]
            found[auto] = {each.__name__ for each in (classes if isinstance(classes, tuple) else (classes,))}
    return found
