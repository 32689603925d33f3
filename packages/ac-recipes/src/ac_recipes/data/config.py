"""The sections of a recipe that say what is trained on. Loads without torch.

Field names are those of NeMo AutoModel recipes where the two mean the same thing.
"""

from dataclasses import dataclass, field
from typing import Literal

from ac_recipes.images.config import DigitsDatasetConfig
from ac_recipes.section import Section, at_least

VOCAB_SIZE = 2048
VALIDATION_FRACTION = 0.05
ROLES = ("text", "prompt", "completion", "messages", "tools", "context", "question", "answers")
"""Names that a key of a record may have here; `column_mapping` renames others to them."""


@dataclass(frozen=True, kw_only=True)
class TextDatasetConfig(Section):
    """Plain text, cut into sequences.

    text: `pydoc_topics`, the English text on the Python language that every Python carries, or a list of UTF-8 files
        (relative to the working directory). Each topic or file is one document.
    sequence_length: tokens of one training sequence.
    validation_fraction: share of the documents' text, in sequences, that is held out and never trained on; `null`:
        0.05, or nothing where there is a `validation_dataset`.
    """

    kind: Literal["text"] = "text"
    text: Literal["pydoc_topics"] | tuple[str, ...] = "pydoc_topics"
    sequence_length: int = 256
    validation_fraction: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, self, "sequence_length")
        _is_fraction(self)
        if isinstance(self.text, str) and self.text != "pydoc_topics":
            raise ValueError(f"text: {self.text!r} is neither 'pydoc_topics' nor a list of files")
        if not self.text:
            raise ValueError("text: the list of files is empty")


@dataclass(frozen=True, kw_only=True)
class RecordsDatasetConfig(Section):
    """Records with a known meaning, one training example each.

    A record is `{"text"}`, `{"prompt", "completion"}`, `{"messages": [{"role", "content"}, ...]}` or, as in SQuAD,
    `{"context", "question", "answers"}`.

    path_or_dataset_id: a file or a list of files (`.jsonl`; `.json`, a list of records or SQuAD's own layout; `.yml`,
        conversations as lists of turns), `package:NAME/PATTERN` for files that an installed package carries, or
        the name or folder of a Hugging Face dataset (extra `datasets`).
    name, split: subset and split of a Hugging Face dataset.
    column_mapping: what the keys of the records are called here, and what there: `{completion: output}`.
    sequence_length: the most tokens that one example may give as inputs.
    truncation: what becomes of a longer one: an `error`, cut off at the `right`, or `drop`.
    padding: examples of one batch are padded to its `longest`, or to `max_length`, which is sequence_length.
    answer_only_loss_mask: count completions, answers and assistant turns only; false: count every token.
    limit_dataset_samples: take only so many records, the first ones.
    validation_fraction: share of the records that is held out and never trained on, as for text.
    """

    kind: Literal["records"] = "records"
    path_or_dataset_id: str | tuple[str, ...]
    name: str | None = None
    split: str = "train"
    column_mapping: dict[str, str] = field(default_factory=dict)
    sequence_length: int = 1024
    truncation: Literal["error", "right", "drop"] = "error"
    padding: Literal["longest", "max_length"] = "longest"
    answer_only_loss_mask: bool = True
    limit_dataset_samples: int | None = None
    validation_fraction: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, self, "sequence_length")
        _is_fraction(self)
        if self.limit_dataset_samples is not None:
            at_least(1, self, "limit_dataset_samples")
        for role in self.column_mapping:
            if role not in ROLES:
                raise ValueError(f"column_mapping: {role!r} is not one of {', '.join(map(repr, ROLES))}")

    @property
    def sources(self) -> tuple[str, ...]:
        """What `path_or_dataset_id` names, as a tuple."""
        return (self.path_or_dataset_id,) if isinstance(self.path_or_dataset_id, str) else self.path_or_dataset_id


DatasetConfig = TextDatasetConfig | RecordsDatasetConfig | DigitsDatasetConfig


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig(Section):
    """The tokenizer. Without `pretrained_model_name_or_path` it is the pretrained model's, or, where the model has new
    weights, a byte-level BPE that is trained on the data when the run starts and kept in the run's folder.

    pretrained_model_name_or_path: as in `model`.
    vocab_size: of the one that is trained here.
    chat_template: a file with a Jinja template for messages, in place of the tokenizer's own.
    """

    pretrained_model_name_or_path: str | None = None
    vocab_size: int = VOCAB_SIZE
    chat_template: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 257 <= self.vocab_size <= 10_000_000:
            raise ValueError(
                f"vocab_size: {self.vocab_size} is not between 257 (256 bytes and the end-of-text token) and 10 million"
            )
        self.check_vocab_size(self.pretrained_model_name_or_path)

    def check_vocab_size(self, pretrained: str | None) -> None:
        """Refuse a `vocab_size` beside a `pretrained` tokenizer, which has its own."""
        if pretrained is not None and self.vocab_size != VOCAB_SIZE:
            raise ValueError(f"vocab_size: the pretrained tokenizer of {pretrained!r} has its own; leave it out")


@dataclass(frozen=True, kw_only=True)
class PackedSequenceConfig(Section):
    """Several records in one row, none of which sees another.

    packed_sequence_size: tokens of a row; 0: do not pack, one padded record a row.
    """

    packed_sequence_size: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(0, self, "packed_sequence_size")


def check_together(
    dataset: DatasetConfig,
    validation: TextDatasetConfig | RecordsDatasetConfig | None,
    packed: PackedSequenceConfig,
) -> None:
    """What the data sections have against each other.

    Raises:
        ValueError: beginning with the section and the field.
    """
    size = packed.packed_sequence_size
    if isinstance(dataset, DigitsDatasetConfig):
        if size:
            raise ValueError("packed_sequence.packed_sequence_size: examples with images are not packed; leave it at 0")
        if validation is not None:
            raise ValueError(
                "validation_dataset: digits hold out images of their own; leave it out, and set "
                "dataset.validation_fraction"
            )
        return
    for section, config in (("dataset", dataset), ("validation_dataset", validation)):
        if isinstance(config, RecordsDatasetConfig) and (not config.path_or_dataset_id or "" in config.sources):
            raise ValueError(f"{section}.path_or_dataset_id: needs a file, a list of files, or the name of a dataset")
        if size and isinstance(config, TextDatasetConfig):
            raise ValueError(
                "packed_sequence.packed_sequence_size: plain text is cut into full sequences and needs no packing; "
                "leave it at 0"
            )
        if size and config is not None and config.sequence_length > size:
            raise ValueError(
                f"{section}.sequence_length: {config.sequence_length} tokens do not fit into a row of "
                f"packed_sequence.packed_sequence_size {size}"
            )
    if validation is not None and dataset.validation_fraction:
        raise ValueError(
            f"dataset.validation_fraction: {dataset.validation_fraction} is to be held out, but there is a "
            "validation_dataset; leave one of them out"
        )
    if validation is not None and validation.validation_fraction:
        raise ValueError("validation_dataset.validation_fraction: all of it is for validation; leave it out")


def _is_fraction(config: DatasetConfig) -> None:
    if config.validation_fraction is not None and not 0 <= config.validation_fraction < 1:
        raise ValueError(f"validation_fraction: {config.validation_fraction!r} is not in [0, 1)")
