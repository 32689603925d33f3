"""From recipes to runs on records."""

import json
import re

import pytest
import torch

from ac_recipes.errors import UsageError
from ac_recipes.load import load_recipe
from ac_recipes.reader import RecipeError
from ac_recipes.training.run_folder import RunFolder
from ac_recipes.training.trainer import Trainer, train

RECORDS = [{"prompt": f"The square of {n} is", "completion": f" {n * n}."} for n in range(1, 31)]


@pytest.fixture
def on_records(tiny, tiny_file, text_file, jsonl):
    """The tiny recipe on records; `on_records(records, setting, ...)`."""

    def build(records, *settings):
        text = tiny_file.read_text().replace(
            f"text: [{text_file}]\n  sequence_length: 16",
            f"kind: records\n  path_or_dataset_id: {jsonl(*records)}\n  sequence_length: 64",
        )
        tiny_file.write_text(text)
        return tiny(*settings)

    return build


def losses(result):
    return [line["loss"] for line in RunFolder(result.run).read_metrics() if "loss" in line]


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_records_train_padded_and_packed_and_checkpointing_changes_no_bit(on_records, policy, capsys):
    for packing in ("packed_sequence.packed_sequence_size=0", "packed_sequence.packed_sequence_size=64"):
        on = train(on_records(RECORDS, packing, f"distributed.activation_checkpointing={policy}"), "tiny")
        off = train(on_records(RECORDS, packing, "distributed.activation_checkpointing=false"), "tiny")
        assert losses(on) == losses(off)
        assert losses(on)[-1] < losses(on)[0]
    assert "packed into" in capsys.readouterr().out


def test_a_run_on_packed_records_resumes_to_the_bit(on_records):
    settings = ("packed_sequence.packed_sequence_size=64", "lr_scheduler.lr_decay_style=constant")
    whole = train(on_records(RECORDS, *settings), "tiny")
    part = train(on_records(RECORDS, *settings, "step_scheduler.max_steps=3"), "tiny")
    assert losses(train(on_records(RECORDS, *settings), "tiny", resume=part.run)) == losses(whole)


def test_resuming_on_other_records_is_refused(on_records):
    result = train(on_records(RECORDS), "tiny")
    other = on_records([*RECORDS[:-1], {"prompt": "x", "completion": "y"}], "step_scheduler.max_steps=8")
    with pytest.raises(UsageError, match="is not the data that"):
        train(other, "tiny", resume=result.run)


def test_conversations_with_a_template_and_a_validation_set(on_records, tmp_path, capsys, talk, chatml):
    (tmp_path / "chat.jinja").write_text(chatml)
    (tmp_path / "held.jsonl").write_text(json.dumps({"messages": talk}) + "\n")
    result = train(
        on_records(
            [{"messages": talk[:3]}] * 8,
            "validation_dataset.kind=records",
            f"validation_dataset.path_or_dataset_id={tmp_path / 'held.jsonl'}",
            f"tokenizer.chat_template={tmp_path / 'chat.jinja'}",
            "dataset.sequence_length=256",
            "dataset.validation_fraction=null",
            "step_scheduler.max_steps=2",
        ),
        "tiny",
    )
    assert result.validation_loss > 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("records")]
    assert "8 records, 1 held out" in row
    assert re.search(r"\d+% of \d+", row)


def test_an_ignore_index_of_another_value_ignores_the_same(on_records):
    usual = train(on_records(RECORDS, "step_scheduler.max_steps=2"), "tiny")
    other = train(on_records(RECORDS, "step_scheduler.max_steps=2", "loss_fn.ignore_index=-7"), "tiny")
    assert losses(usual) == losses(other)


def test_labels_belong_to_the_token_after_the_input(on_records, monkeypatch):
    seen = []
    microbatches = Trainer.microbatches

    def watch(self):
        batches = microbatches(self)
        seen.extend((self.data.tokenizer, batch) for batch in batches)
        return batches

    monkeypatch.setattr(Trainer, "microbatches", watch)
    train(on_records(RECORDS, "step_scheduler.max_steps=1"), "tiny")
    tokenizer, batch = seen[0]
    row, labels = batch["input_ids"][0], batch["labels"][0]
    first, last = labels.ne(-100).nonzero()[[0, -1], 0].tolist()
    assert tokenizer.decode(row[: first + 1]).startswith("The square of")
    assert torch.equal(row[first + 1 : last + 1], labels[first:last])
    assert labels[last] == tokenizer.eos_token_id


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("packed_sequence.packed_sequence_size=32", "dataset.sequence_length: 64 tokens do not fit into a row"),
        ("packed_sequence.packed_sequence_size=-1", "packed_sequence.packed_sequence_size: -1 is below 0"),
        ("dataset.path_or_dataset_id=[]", "dataset.path_or_dataset_id: needs a file"),
        ("dataset.column_mapping={promt: x}", "dataset.column_mapping: 'promt' is not one of 'text', 'prompt'"),
        ("dataset.truncation=left", "dataset.truncation: "),
        ("dataset.limit_dataset_samples=0", "dataset.limit_dataset_samples: 0 is below 1"),
        ("tokenizer.pretrained_model_name_or_path=x", "tokenizer.vocab_size: the pretrained tokenizer of 'x'"),
    ],
)
def test_sections_that_do_not_fit(on_records, setting, message):
    with pytest.raises(RecipeError) as caught:
        on_records(RECORDS, setting)
    assert message in str(caught.value)


def test_text_is_not_packed(tiny):
    with pytest.raises(RecipeError, match="plain text is cut into full sequences and needs no packing"):
        tiny("packed_sequence.packed_sequence_size=64")


def test_what_is_held_out_is_said_once(on_records):
    validation = ("validation_dataset.kind=records", "validation_dataset.path_or_dataset_id=x.jsonl")
    with pytest.raises(RecipeError, match=r"validation_fraction: 0\.1 is to be held out, but there is a valid"):
        on_records(RECORDS, *validation)
    with pytest.raises(RecipeError, match=r"validation_dataset\.validation_fraction: all of it is for validation"):
        on_records(
            RECORDS,
            *validation,
            "dataset.validation_fraction=null",
            "validation_dataset.validation_fraction=0.1",
        )


def test_check_tells_a_bad_record_where_the_recipe_names_the_file(on_records, tiny_file):
    on_records([RECORDS[0], {"prompt": "a"}])
    with pytest.raises(RecipeError) as caught:
        load_recipe(str(tiny_file))
    place = r"tiny\.yaml:\d+:23: dataset\.path_or_dataset_id: \S+data\.jsonl:2: has 'prompt' but no 'completion'"
    assert re.search(place, str(caught.value))
