"""Questions on a context, as in SQuAD (Rajpurkar et al., 2016)."""

from collections.abc import Iterator
from typing import Any

LAYOUT = "{data: [{paragraphs: [{context, qas: [{question, answers}]}]}]}"
"""Of its files."""


def answer_of(fields: dict[str, Any]) -> str | None:
    """The first answer of a record. `answers` is SQuAD's `{"text": [...]}`, a list of `{"text"}`, a list of strings, or
    one string; None if there is no answer in it."""
    answers = fields.get("answers")
    if isinstance(answers, dict):
        answers = answers.get("text")
    if isinstance(answers, list):
        answers = answers[0] if answers else None
    if isinstance(answers, dict):
        answers = answers.get("text")
    return answers.strip() if isinstance(answers, str) and answers.strip() else None


def as_messages(fields: dict[str, Any]) -> list[dict[str, str]]:
    """For a tokenizer with a chat template: the context and the question are the user's, the answer the assistant's."""
    return [
        {"role": "user", "content": f"Context: {fields['context'].strip()}\nQuestion: {fields['question'].strip()}"},
        {"role": "assistant", "content": answer_of(fields) or ""},
    ]


def as_prompt(fields: dict[str, Any]) -> tuple[str, str]:
    """For a tokenizer without: prompt and completion."""
    prompt = f"Context: {fields['context'].strip()}\nQuestion: {fields['question'].strip()}\nAnswer:"
    return prompt, f" {answer_of(fields)}"


def flatten(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The records of a file in SQuAD's own layout, with where each stands in it."""
    for a, article in enumerate(document["data"]):
        for p, paragraph in enumerate(article["paragraphs"]):
            for q, question in enumerate(paragraph["qas"]):
                where = f"data[{a}].paragraphs[{p}].qas[{q}]"
                yield (
                    where,
                    {
                        "context": paragraph["context"],
                        "question": question["question"],
                        "answers": question.get("answers", []),
                    },
                )
