"""From a recipe to examples: read, tokenize, hold out. Every rank does it, and gets the same."""

from dataclasses import dataclass, field

from tokenizers import Tokenizer

from ac_recipes.data.examples import Examples
from ac_recipes.errors import UsageError
from ac_recipes.images.config import DigitsDatasetConfig
from ac_recipes.images.digits import Digits, read_digits, texts
from ac_recipes.images.examples import IMAGE, SPECIAL_TOKENS, image_examples
from ac_recipes.images.layout import image_problems, layout_of
from ac_recipes.model_config import transformers_config
from ac_recipes.recipe import Recipe
from ac_recipes.training.ranks import Ranks
from ac_recipes.training.run_folder import RunFolder
from ac_recipes.training.text import cut_sequences, hash_of, read_documents, train_tokenizer


@dataclass(frozen=True)
class Prepared:
    """The data of a run.

    fingerprint: SHA-256 of what it was made from; a resumed run must find the same.
    detail: what became of the data, in a line.
    model_fields: what the model's configuration has to say for this data, besides the size of the vocabulary.
    """

    train: Examples
    validation: Examples
    tokenizer: Tokenizer
    fingerprint: str
    detail: str
    model_fields: dict[str, int] = field(default_factory=dict)


def read_source(recipe: Recipe) -> list[str] | Digits:
    """The documents or the images that a recipe names.

    Raises:
        UsageError: they cannot be read, or the model cannot take them.
    """
    if not isinstance(recipe.dataset, DigitsDatasetConfig):
        return read_documents(recipe.dataset)
    for problem in image_problems(recipe, transformers_config(recipe.model.config)):
        raise UsageError(f"{'.'.join(map(str, problem.path))}: {problem.message}")
    return read_digits()


def prepare(recipe: Recipe, run: RunFolder, ranks: Ranks, *, resumed: bool = False) -> Prepared:
    """The examples and the tokenizer. Rank 0 trains the tokenizer; it is kept in the run's folder, so that every rank
    and every resumed run encode alike.

    Raises:
        UsageError: the data does not fit the recipe; or a resumed run was trained on other data, or its tokenizer is
            damaged.
    """
    source = read_source(recipe)
    fingerprint = source.fingerprint if isinstance(source, Digits) else hash_of(source)
    if not resumed and ranks.is_first:
        run.fingerprint.write_text(fingerprint)
        of, special = (texts(), SPECIAL_TOKENS) if isinstance(source, Digits) else (source, ())
        train_tokenizer(of, recipe.tokenizer.vocab_size, special).save(str(run.tokenizer))
    ranks.wait()
    if not run.fingerprint.is_file() or run.fingerprint.read_text() != fingerprint:
        raise UsageError(f"--resume: dataset is not the data that {run.path} was trained on")
    try:
        tokenizer = Tokenizer.from_file(str(run.tokenizer))
    except Exception as error:  # tokenizers raises nothing narrower
        raise UsageError(f"--resume: {run.tokenizer} cannot be read: {error}") from error
    if isinstance(source, Digits):
        return _conversations(source, recipe, tokenizer, fingerprint)
    train, held_out = cut_sequences(source, tokenizer, recipe.dataset)
    return Prepared(train, held_out, tokenizer, fingerprint, f"{len(train)} sequences, {len(held_out)} held out")


def _conversations(digits: Digits, recipe: Recipe, tokenizer: Tokenizer, fingerprint: str) -> Prepared:
    layout = layout_of(transformers_config(recipe.model.config))
    train, held_out = image_examples(digits, tokenizer, recipe.dataset, layout, recipe.loss_fn.ignore_index)
    detail = (
        f"{len(train.images)} images, {len(held_out.images)} held out; {train.input_ids.shape[1]} questions about "
        f"each, {layout.tokens} tokens an image"
    )
    return Prepared(train, held_out, tokenizer, fingerprint, detail, {"image_token_id": tokenizer.token_to_id(IMAGE)})
