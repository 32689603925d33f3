"""Every mistake in a data file is told with its line, before anything is trained."""

import json

import pytest

from ac_recipes.data.config import RecordsDatasetConfig
from ac_recipes.data.records import DataError, read_records
from ac_recipes.errors import UsageError

GOOD = {"prompt": "a", "completion": "b"}


def read(*files, **options):
    return read_records(RecordsDatasetConfig(path_or_dataset_id=files, **options))


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b'{"prompt": "a", "completion": }', "2:31: not JSON: Expecting value"),
        (b'{"prompt": "caf\xe9", "completion": "b"}', "2: not UTF-8 (byte 15 of the line)"),
        (b"[1, 2]", "2: expected a JSON object, got list"),
        (b"[" * 100_000, "2: nested too deeply"),
        ({"prompt": "a"}, "2: has 'prompt' but no 'completion'"),
        ({"prompt": "a", "completion": 3}, "2: 'completion' is int, not text"),
        ({"prompt": "a", "completion": ""}, "2: 'completion' is empty: nothing in it would count"),
        ({"text": ""}, "2: 'text' is empty: nothing in it would count"),
        ({"instruction": "a", "output": "b"}, "2: has the keys 'instruction', 'output'; a record has {messages} or"),
        ({}, "2: has the keys none; a record has"),
        ({"messages": []}, "2: 'messages' is not a list of messages"),
        ({"messages": [{"content": "a"}]}, "2: message 1 has no 'role'; it has 'content', and a message is {role, "),
        (
            {"messages": [{"from": "gpt", "value": "a"}]},
            "2: message 1 has no 'role'; it has 'from', 'value', and a message is {role, content}: write 'from'",
        ),
        ({"messages": [{"role": "assistant", "content": [1]}]}, "2: 'content' of message 1 is not text"),
        ({"messages": [{"role": "user", "content": "a"}]}, "2: no message has the role 'assistant'"),
        ({"context": "c", "question": "q", "answers": {"text": []}}, "2: has no answer in 'answers'"),
    ],
)
def test_a_bad_record_is_told_by_file_and_line(jsonl, line, told):
    file = jsonl(GOOD, line, GOOD)
    with pytest.raises(DataError) as caught:
        read(file)
    assert str(caught.value).startswith(f"{file}:{told}")
    assert len(caught.value.faults) == 1


def test_all_bad_records_are_counted_and_the_first_twenty_told(jsonl):
    with pytest.raises(DataError) as caught:
        read(jsonl(*[{f"k{n}": n} for n in range(30)]))
    lines = str(caught.value).splitlines()
    assert len(lines) == 21
    assert lines[-1] == "... and 10 more like these"


def test_an_empty_file_and_one_that_is_not_there(jsonl, tmp_path):
    file = jsonl(b"", b"  ")
    with pytest.raises(DataError, match=r"data\.jsonl:1: the file holds no record"):
        read(file)
    with pytest.raises(UsageError, match=r"cannot read .*gone\.jsonl: No such file"):
        read(str(tmp_path / "gone.jsonl"))
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(UsageError, match="cannot read .*: Is a directory"):
        read(str(tmp_path / "folder.jsonl"))


def test_one_mistake_in_many_records_is_one_line(jsonl):
    file = jsonl(*[{"prompt": "a"}] * 30, {"conversations": [{"from": "gpt", "value": "a"}]}, GOOD)
    with pytest.raises(DataError) as caught:
        read(file)
    of_all, other = str(caught.value).splitlines()
    assert of_all == f"{file}:1: has 'prompt' but no 'completion'; the same of 29 more records, up to {file}:30"
    assert other.startswith(f"{file}:31: has the keys 'conversations'; ")
    assert other.endswith("(dataset.column_mapping renames keys: {messages: conversations})")


def test_blank_lines_a_byte_order_mark_and_windows_line_ends_are_fine(jsonl):
    line = json.dumps(GOOD).encode()
    file = jsonl(b"\xef\xbb\xbf" + line + b"\r", b"", line)
    assert [record.place for record in read(file)] == [f"{file}:1", f"{file}:3"]


def test_keys_are_renamed(jsonl):
    file = jsonl({"instruction": "a", "output": "b"})
    (record,) = read(file, column_mapping={"prompt": "instruction", "completion": "output"})
    assert record.fields["completion"] == "b"
    with pytest.raises(DataError, match=r"data\.jsonl:1: has no key 'response', which column_mapping names"):
        read(file, column_mapping={"completion": "response"})


def test_only_so_many(jsonl):
    assert len(read(jsonl(*[GOOD] * 5), limit_dataset_samples=3)) == 3


def test_a_json_list_has_lines_too(tmp_path):
    file = tmp_path / "data.json"
    file.write_text('[\n  {"prompt": "a",\n   "completion": "]"},\n\n  {"prompt": "a", "completion": "b"}, 3]')
    with pytest.raises(DataError, match=r"^\S*data\.json:5: expected a JSON object, got int$"):
        read(str(file))
    file.write_text(file.read_text().replace(", 3", ""))
    assert [record.place for record in read(str(file))] == [f"{file}:2", f"{file}:5"]
    file.write_text("[]")
    with pytest.raises(DataError, match="holds no record"):
        read(str(file))
    file.write_text('{"prompt": "a",\n}')
    with pytest.raises(DataError, match=r"data\.json:\d+:\d+: not JSON"):
        read(str(file))


def test_squad_s_own_layout(tmp_path):
    file = tmp_path / "dev.json"
    question = {"question": "Who?", "answers": [{"text": "Ada", "answer_start": 0}], "id": "1"}
    bad = {"question": "When?", "answers": []}
    squad = {"version": "1.1", "data": [{"title": "t", "paragraphs": [{"context": "Ada.", "qas": [question]}]}]}
    file.write_text(json.dumps(squad))
    (record,) = read(str(file))
    assert record.fields == {"context": "Ada.", "question": "Who?", "answers": question["answers"]}
    squad["data"][0]["paragraphs"][0]["qas"].append(bad)
    file.write_text(json.dumps(squad))
    with pytest.raises(DataError, match=r"dev\.json:data\[0\]\.paragraphs\[0\]\.qas\[1\]: has no answer"):
        read(str(file))
    file.write_text('{"data": [{"paragraphs": 3}]}')
    with pytest.raises(DataError, match=r"dev\.json:1: is not in SQuAD's layout \{data.*\}: a part of it is no"):
        read(str(file))


def test_conversations_in_yaml(tmp_path):
    file = tmp_path / "talk.yml"
    file.write_text("conversations:\n- - hi\n  - hello\n  - bye\n- - alone\n- - how are you\n  - 42\n")
    first, second = read(str(file))
    assert first.place == f"{file}:2"
    roles = [("user", "hi"), ("assistant", "hello")]
    assert [(m["role"], m["content"]) for m in first.fields["messages"]] == roles
    assert second.fields["messages"][1] == {"role": "assistant", "content": "42"}
    file.write_text("conversations:\n- - hi\n  - {a: b}\n")
    with pytest.raises(UsageError, match=r"talk\.yml:2: expected a list of turns"):
        read(str(file))


def test_a_dataset_of_hugging_face(tmp_path):
    pytest.importorskip("datasets")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "train.jsonl").write_text(f"{json.dumps(GOOD)}\n" * 2)
    first, second = read(str(tmp_path / "folder"))
    assert first.fields == second.fields == GOOD
    assert second.place == f"{tmp_path / 'folder'}[train][1]"
    with pytest.raises(UsageError, match=r"^dataset\.path_or_dataset_id: the dataset .* cannot be loaded: .*dev"):
        read(str(tmp_path / "folder"), split="dev")


def test_a_dataset_of_hugging_face_without_the_library_is_one_line(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(UsageError, match=r"^dataset\.path_or_dataset_id: 'rajpurkar/squad' .*ac-recipes\[datasets\]"):
        read("rajpurkar/squad")


def test_files_of_a_package_are_found_without_importing_it():
    with pytest.raises(UsageError, match="the package no-such-package is not installed here; .*pip install no-such"):
        read("package:no-such-package/x.jsonl")
    with pytest.raises(UsageError, match=r"the package ac-recipes has no file gone\.jsonl"):
        read("package:ac-recipes/gone.jsonl")
    with pytest.raises(UsageError, match="is not of the form package:NAME/PATTERN"):
        read("package:ac-recipes")
