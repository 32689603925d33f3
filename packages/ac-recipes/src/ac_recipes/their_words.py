"""What another library's error says, in a sentence of ours."""

_MEANT_FOR_USERS = (ValueError, OSError, ImportError)
"""What libraries raise with a text that was written for whoever called them."""


def said(error: BaseException, limit: int = 300) -> str:
    """The end of a sentence that begins with the library, and what it was asked to do: on one line, with the kind of
    the error where its text alone would say nothing (`'gellu'`, `integer division or modulo by zero`)."""
    text = " ".join(str(error).split())[:limit]
    if isinstance(error, KeyError):
        return f"it looked for {text} and found nothing of that name"
    if isinstance(error, _MEANT_FOR_USERS) and text:
        return text
    return f"it stopped with {type(error).__name__}: {text or 'no text'}"
