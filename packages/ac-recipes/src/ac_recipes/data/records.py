"""Records: read from files or a Hugging Face dataset, and refused with file and line. Loads without torch."""

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from ac_core.sizes import counted
from ac_recipes.data import squad
from ac_recipes.data.config import RecordsDatasetConfig
from ac_recipes.data.files import read_bytes
from ac_recipes.data.shapes import fault_in
from ac_recipes.errors import UsageError
from ac_recipes.pretrained import PACKAGE, files_of_package

SUFFIXES = (".jsonl", ".json", ".yml", ".yaml")
_MOST_TOLD = 20


class Record(NamedTuple):
    """A record and where it was found: `file:line`, or a place in a dataset."""

    place: str
    fields: dict[str, Any]


class Fault(NamedTuple):
    """What is wrong with the data, and where."""

    place: str
    message: str

    def __str__(self) -> str:
        return f"{self.place}: {self.message}"


class DataError(UsageError):
    """The data has mistakes: one line for all that are the same, the first of them."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.faults = tuple(faults)
        places: dict[str, list[str]] = {}
        for fault in self.faults:
            places.setdefault(fault.message, []).append(fault.place)
        lines = [_of_all(message, where) for message, where in places.items()]
        if len(lines) > _MOST_TOLD:
            lines[_MOST_TOLD:] = [f"... and {len(lines) - _MOST_TOLD} more like these"]
        super().__init__("\n".join(lines))


def _of_all(message: str, places: list[str]) -> str:
    """`message` at the first of `places`, with how many there are."""
    more = f"; the same of {counted(len(places) - 1, 'more record')}, up to {places[-1]}" if len(places) > 1 else ""
    return f"{places[0]}: {message}{more}"


def read_records(config: RecordsDatasetConfig, section: str = "dataset") -> list[Record]:
    """The records that `config` names, with their keys renamed, every one of a known shape.

    Raises:
        DataError: some are not; with the place of each.
        UsageError: there are none, or they cannot be had.
    """
    found: list[Record] = []
    faults: list[Fault] = []
    limit = config.limit_dataset_samples
    for item in islice(_renamed(_all(config, section), config.column_mapping), limit):
        if isinstance(item, Fault):
            faults.append(item)
        elif (message := fault_in(item.fields)) is not None:
            faults.append(Fault(item.place, message))
        else:
            found.append(item)
    if faults:
        raise DataError(faults)
    if not found:
        raise UsageError(f"{section}.path_or_dataset_id: {', '.join(config.sources)} holds no record")
    return found


def is_local(source: str) -> bool:
    """Whether a source is a file by its name; any other is a Hugging Face dataset or a package."""
    return not source.startswith(PACKAGE) and Path(source).suffix in SUFFIXES


def _all(config: RecordsDatasetConfig, section: str) -> Iterator[Record | Fault]:
    field = f"{section}.path_or_dataset_id"
    for source in config.sources:
        if source.startswith(PACKAGE):
            for path in files_of_package(source, field):
                yield from _read_file(str(path), field)
        elif is_local(source):
            yield from _read_file(source, field)
        else:
            from ac_recipes.data.hub import load_hub_dataset

            for index, row in enumerate(load_hub_dataset(source, config, field)):
                yield Record(f"{source}[{config.split}][{index}]", row)


def _renamed(items: Iterable[Record | Fault], mapping: dict[str, str]) -> Iterator[Record | Fault]:
    for item in items:
        if isinstance(item, Fault) or not mapping:
            yield item
        elif missing := [theirs for theirs in mapping.values() if theirs not in item.fields]:
            has = ", ".join(map(repr, item.fields))
            yield Fault(item.place, f"has no key {missing[0]!r}, which column_mapping names; it has {has}")
        else:
            yield Record(item.place, item.fields | {role: item.fields[theirs] for role, theirs in mapping.items()})


def _read_file(name: str, field: str) -> Iterator[Record | Fault]:
    kind = Path(name).suffix
    if kind not in SUFFIXES:
        raise UsageError(f"{field}: {name} is none of {', '.join(SUFFIXES)}")
    data = read_bytes(name)
    if kind == ".jsonl":
        items = _json_lines(name, data)
    elif kind == ".json":
        items = _json_file(name, data)
    else:
        from ac_recipes.data.turns import read_turns

        items = (Record(f"{name}:{line}", fields) for line, fields in read_turns(name, data))
    is_empty = True
    for item in items:
        is_empty = False
        yield item
    if is_empty:
        yield Fault(f"{name}:1", "the file holds no record")


def _json_lines(name: str, data: bytes) -> Iterator[Record | Fault]:
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if line.strip():
            yield _object(f"{name}:{number}", line)


def _object(place: str, line: bytes) -> Record | Fault:
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return Fault(place, f"not UTF-8 (byte {error.start} of the line)")
    except json.JSONDecodeError as error:
        return Fault(f"{place}:{error.colno}", f"not JSON: {error.msg}")
    except RecursionError:
        return Fault(place, "nested too deeply")
    if not isinstance(value, dict):
        return Fault(place, f"expected a JSON object, got {type(value).__name__}")
    return Record(place, value)


def _json_file(name: str, data: bytes) -> Iterator[Record | Fault]:
    """The records of one JSON document: a list of them, or SQuAD's own layout."""
    try:
        text = data.decode("utf-8-sig")
        document = json.loads(text)
    except UnicodeDecodeError as error:
        yield Fault(f"{name}:{data[: error.start].count(10) + 1}", f"not UTF-8 (byte {error.start})")
    except json.JSONDecodeError as error:
        yield Fault(f"{name}:{error.lineno}:{error.colno}", f"not JSON: {error.msg}")
    except RecursionError:
        yield Fault(f"{name}:1", "nested too deeply")
    else:
        if isinstance(document, list):
            yield from _list_items(name, text)
        elif isinstance(document, dict) and "data" in document:
            try:
                yield from (Record(f"{name}:{where}", fields) for where, fields in squad.flatten(document))
            except (KeyError, TypeError) as error:
                what = f"has no key {error}" if isinstance(error, KeyError) else "is no mapping"
                yield Fault(f"{name}:1", f"is not in SQuAD's layout {squad.LAYOUT}: a part of it {what}")
        else:
            yield Fault(f"{name}:1", f"expected a list of records, or SQuAD's layout {squad.LAYOUT}")


def _list_items(name: str, text: str) -> Iterator[Record | Fault]:
    """The items of a JSON list that is known to be sound, each with the line where it begins."""
    decoder = json.JSONDecoder()
    at, line, seen = text.index("[") + 1, 1, 0
    while True:
        while text[at] in " \t\r\n,":
            at += 1
        if text[at] == "]":
            return
        line += text.count("\n", seen, at)
        seen = at
        value, at = decoder.raw_decode(text, at)
        if isinstance(value, dict):
            yield Record(f"{name}:{line}", value)
        else:
            yield Fault(f"{name}:{line}", f"expected a JSON object, got {type(value).__name__}")
