"""Records become tokens; too long ones become what was asked for."""

import pytest

from ac_recipes.data.config import RecordsDatasetConfig
from ac_recipes.data.encode import encode, encode_records
from ac_recipes.data.records import DataError, Record
from ac_recipes.errors import UsageError

QUESTION = {"context": "Ada wrote it.", "question": "Who?", "answers": {"text": ["Ada", "ada"], "answer_start": [0, 0]}}


def config(**options):
    return RecordsDatasetConfig(path_or_dataset_id="x.jsonl", **options)


def texts(tokenizer, fields):
    """What does not count and what does."""
    ids, counted = encode(fields, tokenizer)
    pairs = list(zip(ids, counted, strict=True))
    return tuple(tokenizer.decode([token for token, counts in pairs if counts == side]) for side in (False, True))


def test_what_counts(base_tokenizer):
    assert texts(base_tokenizer, {"text": "four"}) == ("", "four<|endoftext|>")
    assert texts(base_tokenizer, {"prompt": "2*2=", "completion": "four"}) == ("2*2=", "four<|endoftext|>")
    prompt = "Context: Ada wrote it.\nQuestion: Who?\nAnswer:"
    assert texts(base_tokenizer, QUESTION) == (prompt, " Ada<|endoftext|>")


def test_a_question_goes_through_a_chat_template_if_there_is_one(tokenizer):
    user = "<|user|>\nContext: Ada wrote it.\nQuestion: Who?<|endoftext|>\n<|assistant|>\n"
    assert texts(tokenizer, QUESTION) == (user, "Ada<|endoftext|>\n")


def test_a_beginning_token_is_put_once_and_an_end_token_is_not_doubled(base_tokenizer, monkeypatch):
    bare = base_tokenizer("four")["input_ids"]
    end = base_tokenizer.eos_token_id

    def with_both(_self, _text, *, add_special_tokens, **_options):
        return {"input_ids": [7, *bare, end] if add_special_tokens else bare}

    monkeypatch.setattr(type(base_tokenizer), "__call__", with_both)
    assert encode({"text": "four"}, base_tokenizer).ids == [7, *bare, end]
    encoded = encode({"prompt": "four", "completion": "four"}, base_tokenizer)
    assert encoded.ids == [7, *bare, *bare, end]
    assert encoded.counted == [False] * (1 + len(bare)) + [True] * (len(bare) + 1)


def test_every_token_counts_if_asked(base_tokenizer):
    records = [Record("x:1", {"prompt": "2*2=", "completion": "four"})]
    (example,), *_ = encode_records(records, base_tokenizer, config(answer_only_loss_mask=False))
    assert all(example.counted)


@pytest.mark.parametrize(
    ("template", "told"),
    [(None, "messages need a chat template"), ("{{ 'a' }}\n{% for %}", "the template is broken in line 2: ")],
)
def test_a_template_that_is_missing_or_broken_is_told_once_and_of_no_record(base_tokenizer, talk, template, told):
    base_tokenizer.chat_template = template
    try:
        with pytest.raises(UsageError) as caught:
            encode_records([Record(f"x:{n}", {"messages": talk}) for n in range(9)], base_tokenizer, config())
    finally:
        base_tokenizer.chat_template = None
    assert str(caught.value).startswith(f"tokenizer.chat_template: {told}")
    assert "x:" not in str(caught.value)
    assert "\n" not in str(caught.value)


LONG = [
    Record("x:1", {"prompt": "a", "completion": "b"}),
    Record("x:2", {"prompt": "a", "completion": "b" * 20}),
    Record("x:3", {"prompt": "a" * 20, "completion": "b"}),
]


def test_too_long_is_an_error_with_its_place(base_tokenizer):
    with pytest.raises(DataError) as caught:
        encode_records(LONG, base_tokenizer, config(sequence_length=8))
    assert [fault.place for fault in caught.value.faults] == ["x:2", "x:3"]
    assert "22 tokens do not fit into dataset.sequence_length 8; raise it, or set" in str(caught.value)


def test_too_long_is_cut_off_or_left_out(base_tokenizer):
    examples, cut, dropped = encode_records(LONG, base_tokenizer, config(sequence_length=8, truncation="right"))
    assert (len(examples), cut, dropped) == (2, 1, 1), "of the third, nothing that counts would be left"
    assert len(examples[1].ids) == 9, "8 inputs, and the label of the last"
    examples, cut, dropped = encode_records(LONG, base_tokenizer, config(sequence_length=8, truncation="drop"))
    assert (len(examples), cut, dropped) == (1, 0, 2)
    with pytest.raises(UsageError, match=r"no record is left, all 2 are longer than dataset\.sequence_length 8"):
        encode_records(LONG[1:], base_tokenizer, config(sequence_length=8, truncation="drop"))


def test_exactly_as_long_as_allowed_is_not_too_long(base_tokenizer):
    length = len(encode(LONG[1].fields, base_tokenizer).ids) - 1
    assert len(encode_records(LONG[1:2], base_tokenizer, config(sequence_length=length)).examples) == 1
    with pytest.raises(DataError):
        encode_records(LONG[1:2], base_tokenizer, config(sequence_length=length - 1))
