"""From records to tokens, and which of them count."""

from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from ac_recipes.data import squad
from ac_recipes.data.chat import TemplateError, encode_messages
from ac_recipes.data.config import RecordsDatasetConfig
from ac_recipes.data.records import DataError, Fault, Record
from ac_recipes.data.shapes import shape_of
from ac_recipes.errors import UsageError


class Encoded(NamedTuple):
    """One example: its tokens, and which of them the loss counts when they are to be predicted."""

    ids: list[int]
    counted: list[bool]


class EncodedRecords(NamedTuple):
    """The examples of a dataset, and how many of its records were cut off or left out for their length."""

    examples: list[Encoded]
    cut: int
    dropped: int


def encode_records(
    records: list[Record], tokenizer: PreTrainedTokenizerBase, config: RecordsDatasetConfig, section: str = "dataset"
) -> EncodedRecords:
    """Tokenize `records`; those longer than `sequence_length` inputs become what `truncation` says.

    Raises:
        TemplateError: the chat template is missing or broken, which no record can help.
        DataError: with the place of every record that cannot be tokenized, has no token that counts or is too long.
        UsageError: none is left.
    """
    most = config.sequence_length + 1  # the last token is a label only
    examples: list[Encoded] = []
    faults: list[Fault] = []
    cut = dropped = 0
    for record in records:
        try:
            encoded = encode(record.fields, tokenizer)
        except TemplateError:
            raise
        except UsageError as error:
            faults.append(Fault(record.place, str(error)))
            continue
        if not config.answer_only_loss_mask:
            encoded = Encoded(encoded.ids, [True] * len(encoded.ids))
        if not any(encoded.counted[1:]):
            faults.append(Fault(record.place, "no token of this record counts for the loss"))
        elif len(encoded.ids) <= most:
            examples.append(encoded)
        elif config.truncation == "error":
            faults.append(
                Fault(
                    record.place,
                    f"{len(encoded.ids)} tokens do not fit into {section}.sequence_length {config.sequence_length}; "
                    f"raise it, or set {section}.truncation to 'right' or 'drop'",
                )
            )
        elif config.truncation == "right" and any(encoded.counted[1:most]):
            examples.append(Encoded(encoded.ids[:most], encoded.counted[:most]))
            cut += 1
        else:
            dropped += 1
    if faults:
        raise DataError(faults)
    if not examples:
        raise UsageError(
            f"{section}: no record is left, all {dropped} are longer than {section}.sequence_length "
            f"{config.sequence_length}"
        )
    return EncodedRecords(examples, cut, dropped)


def encode(fields: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> Encoded:
    """Tokenize one record of a known shape (`shapes.fault_in` finds nothing in it).

    Text and prompts begin with the tokenizer's beginning-of-text token, if it adds one; text and completions end with
    its end-of-text token. Prompt and completion are tokenized apart, as they are when the model is used. What a
    conversation begins and ends with is up to its chat template.

    Raises:
        TemplateError: the tokenizer has no chat template, or a broken one.
        UsageError: the template cannot take these messages.
    """
    shape = shape_of(fields)
    if shape == "squad" and tokenizer.chat_template is not None:
        return Encoded(*encode_messages(squad.as_messages(fields), tokenizer))
    if shape == "messages":
        if tokenizer.chat_template is None:
            raise TemplateError(
                "tokenizer.chat_template: messages need a chat template, and this tokenizer has none; set it to a file "
                "with one, or tokenizer.pretrained_model_name_or_path to a tokenizer that has one"
            )
        return Encoded(*encode_messages(fields["messages"], tokenizer, fields.get("tools")))
    if shape == "text":
        ids = [*_begin(fields["text"], tokenizer), tokenizer.eos_token_id]
        return Encoded(ids, [True] * len(ids))
    prompt, completion = squad.as_prompt(fields) if shape == "squad" else (fields["prompt"], fields["completion"])
    before = _begin(prompt, tokenizer)
    after = [*_ids(completion, tokenizer, add_special_tokens=False), tokenizer.eos_token_id]
    return Encoded([*before, *after], [False] * len(before) + [True] * len(after))


def _begin(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens with what the tokenizer puts in front, without what it may put at the end."""
    ids = _ids(text, tokenizer, add_special_tokens=True)
    return ids[:-1] if ids and ids[-1] == tokenizer.eos_token_id else ids


def _ids(text: str, tokenizer: PreTrainedTokenizerBase, *, add_special_tokens: bool) -> list[int]:
    return list(tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"])
