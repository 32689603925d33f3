"""What is asked about a digit. Loads without torch."""

from collections.abc import Callable

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

QUESTIONS: dict[str, Callable[[int], str]] = {
    "Which digit is this?": lambda digit: NAMES[digit],
    "Which digit comes next?": lambda digit: NAMES[(digit + 1) % 10],
    "Is the digit even or odd?": lambda digit: "odd" if digit % 2 else "even",
    "Is the digit greater than four?": lambda digit: "yes" if digit > 4 else "no",
}
"""Each question with its answer to a digit."""


def texts() -> list[str]:
    """Every question with every answer, for a tokenizer that is to be trained on them."""
    return [text for question, answer in QUESTIONS.items() for digit in range(10) for text in (question, answer(digit))]


def least_tokens(image_tokens: int) -> int:
    """The fewest inputs that the longest conversation takes with a tokenizer whose tokens end where words do: one that
    is trained here. The image, the marks of the two turns, the words of the question with its mark, and an answer."""
    return image_tokens + 2 + max(len(question.split()) + 1 for question in QUESTIONS) + 1
