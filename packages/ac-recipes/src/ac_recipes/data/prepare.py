"""From a recipe to examples: read, tokenize, hold out, pack. Every rank does it, and gets the same."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

from ac_core.sizes import counted
from ac_recipes.data.config import VALIDATION_FRACTION, DatasetConfig, TextDatasetConfig
from ac_recipes.data.encode import encode_records
from ac_recipes.data.examples import Examples, Padded, Shifted
from ac_recipes.data.holdout import places_to_hold_out
from ac_recipes.data.packing import Packed
from ac_recipes.data.records import Record, read_records
from ac_recipes.data.text import Windows, cut_windows, read_documents
from ac_recipes.data.tokenizer import (
    pretrained_tokenizer,
    read_tokenizer,
    save_tokenizer,
    train_tokenizer,
    with_template,
)
from ac_recipes.errors import UsageError
from ac_recipes.images.config import DigitsDatasetConfig
from ac_recipes.images.digits import Digits, read_digits
from ac_recipes.images.examples import IMAGE, SPECIAL_TOKENS, image_examples
from ac_recipes.images.layout import image_problems, layout_of
from ac_recipes.images.questions import texts
from ac_recipes.model_config import transformers_config
from ac_recipes.pretrained import load_config

if TYPE_CHECKING:
    from ac_recipes.recipe import Recipe
    from ac_recipes.training.ranks import Ranks
    from ac_recipes.training.run_folder import RunFolder

Source = list[str] | list[Record] | Digits
"""What was read of one dataset section: documents, records or images."""

Tokenized = Windows | list[Shifted]
"""The examples of one dataset section, in its order."""


@dataclass(frozen=True)
class Prepared:
    """The data of a run.

    fingerprint: a hash of the data as it was read; a resumed run must find the same.
    detail: what became of the data, in a line.
    model_fields: what the model's configuration has to say for this data, besides the size of the vocabulary.
    """

    train: Examples
    validation: Examples
    tokenizer: PreTrainedTokenizerBase
    fingerprint: str
    detail: str = ""
    model_fields: dict[str, int] = field(default_factory=dict)


def read_source(config: DatasetConfig, section: str = "dataset") -> Source:
    """Documents, records or images of one section.

    Raises:
        UsageError: they cannot be read, or have mistakes.
    """
    if isinstance(config, DigitsDatasetConfig):
        return read_digits()
    return read_documents(config) if isinstance(config, TextDatasetConfig) else read_records(config, section)


def prepare(recipe: "Recipe", run: "RunFolder", ranks: "Ranks", *, resumed: bool = False) -> Prepared:
    """The examples and the tokenizer. Rank 0 keeps the tokenizer and the fingerprint in the run's folder, so that every
    rank and every resumed run encode alike.

    Raises:
        UsageError: the data or the tokenizer cannot be had, or does not fit the recipe; or a resumed run was trained on
            other data, or its tokenizer is damaged.
    """
    source, held_out = _sources(recipe)
    fingerprint = fingerprint_of(source if held_out is None else [*source, *held_out])
    if not resumed and ranks.is_first:
        save_tokenizer(_make_tokenizer(recipe, source), run.path)
        run.fingerprint.write_text(fingerprint)
    ranks.wait()
    if not run.fingerprint.is_file():
        raise UsageError(
            f"--resume: {run.fingerprint} is missing, so it cannot be told whether the recipe names the data that the "
            "run was trained on; put it back from a copy of the run, or start a new run"
        )
    if run.fingerprint.read_bytes() != fingerprint.encode():
        raise UsageError(f"--resume: the data that the recipe names is not the data that {run.path} was trained on")
    return _prepared(recipe, source, held_out, read_tokenizer(run.path), fingerprint)


def prepare_here(recipe: "Recipe") -> Prepared:
    """The same for this process alone, without a run folder. Raises as `prepare`."""
    source, held_out = _sources(recipe)
    fingerprint = fingerprint_of(source if held_out is None else [*source, *held_out])
    return _prepared(recipe, source, held_out, _make_tokenizer(recipe, source), fingerprint)


def _sources(recipe: "Recipe") -> tuple[Source, Source | None]:
    source = read_source(recipe.dataset)
    if recipe.validation_dataset is None:
        return source, None
    return source, read_source(recipe.validation_dataset, "validation_dataset")


def _make_tokenizer(recipe: "Recipe", source: Source) -> PreTrainedTokenizerBase:
    special_tokens = SPECIAL_TOKENS if isinstance(source, Digits) else ()
    tokenizer = pretrained_tokenizer(recipe) or train_tokenizer(
        _texts_of(source), recipe.tokenizer.vocab_size, special_tokens
    )
    return with_template(tokenizer, recipe.tokenizer.chat_template)


def _prepared(
    recipe: "Recipe",
    source: Source,
    held_out: Source | None,
    tokenizer: PreTrainedTokenizerBase,
    fingerprint: str,
) -> Prepared:
    if isinstance(source, Digits):
        return _conversations(source, recipe, tokenizer, fingerprint)
    examples, notes = _tokenize(source, recipe.dataset, tokenizer, recipe.loss_fn.ignore_index)
    if held_out is None:
        fraction = recipe.dataset.validation_fraction
        fraction = VALIDATION_FRACTION if fraction is None else fraction
        kept, chosen = places_to_hold_out(len(examples), fraction, _unit(examples))
        train, validation = _pick(examples, kept), _pick(examples, chosen)
    else:
        train = examples
        validation, _ = _tokenize(
            held_out, recipe.validation_dataset, tokenizer, recipe.loss_fn.ignore_index, "validation_dataset"
        )
    rows = _rows(train, recipe.dataset, recipe, tokenizer)
    if isinstance(rows, Packed):
        notes.append(f"packed into {counted(len(rows), 'row')} of {rows.size}, {rows.fill:.0%} full")
    return Prepared(
        train=rows,
        validation=_rows(validation, recipe.validation_dataset or recipe.dataset, recipe, tokenizer),
        tokenizer=tokenizer,
        fingerprint=fingerprint,
        detail=", ".join([f"{len(train)} {_unit(train)}", f"{len(validation)} held out", *notes]),
    )


def fingerprint_of(source: Source) -> str:
    """SHA-256 over documents, records or images."""
    if isinstance(source, Digits):
        return source.fingerprint
    digest = hashlib.sha256()
    for item in source:
        text = item if isinstance(item, str) else json.dumps(item.fields, sort_keys=True, default=str)
        data = text.encode("utf-8", "surrogatepass")
        digest.update(f"{len(data)}:".encode())
        digest.update(data)
    return digest.hexdigest()


def _conversations(digits: Digits, recipe: "Recipe", tokenizer: PreTrainedTokenizerBase, fingerprint: str) -> Prepared:
    image_token = _image_token(tokenizer)
    layout = layout_of(_image_model_config(recipe, image_token))
    train, held_out = image_examples(digits, tokenizer, recipe.dataset, layout, recipe.loss_fn.ignore_index)
    questions = train.input_ids.shape[1]
    detail = (
        f"{len(train.images)} images, {len(held_out.images)} held out; {questions} questions about each, "
        f"{layout.tokens} tokens an image"
    )
    return Prepared(train, held_out, tokenizer, fingerprint, detail, {"image_token_id": image_token})


def _image_token(tokenizer: PreTrainedTokenizerBase) -> int:
    known = tokenizer.get_vocab()
    for token in SPECIAL_TOKENS:
        if token not in known:
            raise UsageError(
                f"tokenizer: {tokenizer.name_or_path or 'it'} has no token {token!r}, and conversations about digits "
                f"are written with {', '.join(SPECIAL_TOKENS)}; leave pretrained_model_name_or_path out, or name a "
                "tokenizer that has them"
            )
    return known[IMAGE]


def _image_model_config(recipe: "Recipe", image_token: int) -> Any:
    """transformers' configuration of the model, which can be shown the images."""
    name = recipe.model.pretrained_model_name_or_path
    if name is None:
        return transformers_config(recipe.model.config)
    config = load_config(name)
    for problem in image_problems(recipe, config):
        raise UsageError(f"model.pretrained_model_name_or_path: {name}: {problem.message}")
    if config.image_token_id != image_token:
        raise UsageError(
            f"tokenizer: its token {IMAGE!r} is {image_token}, and {name} takes {config.image_token_id} for an image; "
            "use the model's own"
        )
    return config


def _tokenize(
    source: Source,
    config: DatasetConfig,
    tokenizer: PreTrainedTokenizerBase,
    ignore_index: int,
    section: str = "dataset",
) -> tuple[Tokenized, list[str]]:
    """Examples that are not batched yet, and what is to be told of them."""
    if isinstance(config, TextDatasetConfig):
        return cut_windows(source, tokenizer, config, section), []
    encoded = encode_records(source, tokenizer, config, section)
    examples = [Shifted.of(example, ignore_index) for example in encoded.examples]
    tokens = sum(len(example.labels) for example in examples)
    counted = sum(int((example.labels != ignore_index).sum()) for example in examples)
    notes = [f"{counted / tokens:.0%} of {tokens} tokens count"]
    notes += [f"{encoded.cut} cut off at {config.sequence_length} tokens"] * bool(encoded.cut)
    notes += [f"{encoded.dropped} left out for their length"] * bool(encoded.dropped)
    return examples, notes


def _rows(examples: Tokenized, config: DatasetConfig, recipe: "Recipe", tokenizer: PreTrainedTokenizerBase) -> Examples:
    if isinstance(examples, Windows):
        return examples
    shared = {
        "pad_id": tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
        "ignore_index": recipe.loss_fn.ignore_index,
    }
    if size := recipe.packed_sequence.packed_sequence_size:
        return Packed.of(examples, size, **shared)
    return Padded(
        examples=examples, pad_to=config.sequence_length if config.padding == "max_length" else None, **shared
    )


def _pick(examples: Tokenized, places: list[int]) -> Tokenized:
    if isinstance(examples, Windows):
        return Windows(examples.tokens[places])
    return [examples[i] for i in places]


def _unit(examples: Tokenized) -> str:
    return "sequences" if isinstance(examples, Windows) else "records"


def _texts_of(source: Source) -> list[str]:
    """All text of the data, for a tokenizer that is to be trained on it."""
    if isinstance(source, Digits):
        return texts()
    return [text for item in source for text in ([item] if isinstance(item, str) else _strings(item.fields))]


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _strings(inner)
