"""What the data sections of an AutoModel recipe mean here."""

from ac_recipes.automodel.rules import (
    Entry,
    KeyPath,
    Translation,
    harmless,
    is_text,
    one_of,
    only,
    refused,
    to,
    unless_null,
)
from ac_recipes.automodel.section import Section, Target, named
from ac_recipes.reader.nodes import MapNode, ScalarNode

_DATASETS = "nemo_automodel.components.datasets"
_SPEED = harmless("changes the speed alone")

COLLATERS = frozenset(
    {
        f"{_DATASETS}.utils.default_collater",
        f"{_DATASETS}.utils.packed_sequence_thd_collater",
        "torch.utils.data.default_collate",
    }
)
"""What makes a batch of examples: padding and stacking, which happen here as well."""


def _padding(translation: Translation, path: KeyPath, entry: Entry) -> None:
    """AutoModel's `padding`: true or `longest`, `max_length`, or none, which leaves it to the collater."""
    if is_text(entry.node, "false", "do_not_pad", "true", "longest"):
        translation.leave_out(path, entry, "padding counts for nothing")
    else:
        translation.put(path, entry)


def _truncation(translation: Translation, path: KeyPath, entry: Entry) -> None:
    """AutoModel's `truncation`: whether an example that is too long is cut off."""
    cuts = is_text(entry.node, "true", "longest_first", "only_first")
    if not cuts and not is_text(entry.node, "false", "do_not_truncate", "null"):
        translation.put(path, entry)
    elif cuts:
        node = ScalarNode(entry.node.place, "right", plain=True)
        translation.put(path, Entry(entry.key_place, node))
    else:
        translation.leave_out(path, entry, "an example that is too long is an error")


def _tokenizer(translation: Translation, path: KeyPath, entry: Entry) -> None:
    """The tokenizer of a dataset. There is one for the run; it is the model's, unless a name is given."""
    known = {"_target_", "pretrained_model_name_or_path", "trust_remote_code"}
    if path[0] != "dataset":
        translation.leave_out(path, entry, "there is one tokenizer for the run")
    elif not isinstance(entry.node, MapNode) or not entry.node.entries.keys() <= known:
        translation.refuse(path, entry, "settings of a tokenizer other than its name")
    elif "pretrained_model_name_or_path" in entry.node.entries:
        name = entry.node.entries["pretrained_model_name_or_path"]
        translation.put(("tokenizer", "pretrained_model_name_or_path"), name)


_RECORDS = {
    "dataset_name": to("path_or_dataset_id"),
    "path_or_dataset": to("path_or_dataset_id"),
    "seq_length": unless_null(to("sequence_length")),
    "padding": _padding,
    "truncation": _truncation,
    "tokenizer": _tokenizer,
    "limit_dataset_samples": unless_null(to("limit_dataset_samples")),
    "num_samples_limit": unless_null(to("limit_dataset_samples")),
    "fp8": only("false", because="training in fp8"),
    "name": unless_null(to("name")),
    "start_of_turn_token": only("null", because="turns found by a token; the tokenizer's template marks them"),
    "shuffle_seed": harmless("the order is drawn from rng.seed"),
    "mask_reasoning_content": only("false", because="masking of reasoning"),
    "mask_history": only("false", because="masking of earlier turns"),
    "unshifted": only("false", because="labels that are not shifted"),
    "skip_invalid_samples": only("false", because="skipping of records that cannot be read"),
    "use_hf_chat_template": only("true", "false", because="true or false"),
    "chat_template": unless_null(refused("a template in the dataset; tokenizer.chat_template names a file")),
}

_OTHER_DATA = (
    "llm.hellaswag.HellaSwag",
    "llm.mock_iterable_dataset.MockIterableDataset",
    "llm.mock.build_unpacked_dataset",
    "llm.megatron_dataset.MegatronPretraining",
    "llm.nanogpt_dataset.NanogptDataset",
    "llm.seq2seq.make_seq2seq_dataset",
    "llm.xlam.make_xlam_dataset",
    "vlm.datasets.make_medpix_dataset",
    "vlm.datasets.make_cord_v2_dataset",
    "vlm.datasets.make_rdr_dataset",
)
_AS_RECORDS = "write its records as JSON Lines, and name the file with kind: records"
_NO_SUCH_DATA = Target(refused=f"this dataset; {_AS_RECORDS}")

_DATASET = Section(
    rules=_RECORDS,
    remedy=_AS_RECORDS,
    targets={
        f"{_DATASETS}.llm.squad.make_squad_dataset": Target({"kind": "records", "path_or_dataset_id": "squad"}),
        f"{_DATASETS}.llm.chat_dataset.ChatDataset": Target({"kind": "records"}),
        f"{_DATASETS}.llm.column_mapped_text_instruction_dataset.ColumnMappedTextInstructionDataset": Target(
            {"kind": "records"}
        ),
        **named(*(f"{_DATASETS}.{name}" for name in _OTHER_DATA), target=_NO_SUCH_DATA),
    },
)

_COLUMNS = Section(rules={"question": to("prompt"), "answer": to("completion")})

_LOADER = Section(
    rules={
        "shuffle": harmless("training data is always shuffled, in an order drawn from rng.seed"),
        "num_workers": _SPEED,
        "pin_memory": _SPEED,
        "persistent_workers": _SPEED,
        "prefetch_factor": _SPEED,
        "drop_last": harmless("every batch is whole"),
        "batch_size": only("null", because="step_scheduler.local_batch_size says it"),
        "collate_fn": one_of(COLLATERS, "batches are padded and stacked here too", because="other batches"),
    },
    targets=named(
        "torchdata.stateful_dataloader.StatefulDataLoader",
        "torch.utils.data.DataLoader",
        target=Target(),
    ),
)

_TOKENIZER = Section(
    rules={"trust_remote_code": harmless("code of a model's repository is never run")},
    targets=named(
        "transformers.AutoTokenizer.from_pretrained",
        "nemo_automodel.NeMoAutoTokenizer.from_pretrained",
        "nemo_automodel._transformers.auto_tokenizer.NeMoAutoTokenizer.from_pretrained",
        target=Target(),
    ),
)

DATA_SECTIONS: dict[str, Section] = {
    "dataset": _DATASET,
    "dataset.column_mapping": _COLUMNS,
    "validation_dataset": _DATASET,
    "validation_dataset.column_mapping": _COLUMNS,
    "dataloader": _LOADER,
    "tokenizer": _TOKENIZER,
}
