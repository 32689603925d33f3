"""What other trainers call a field: transformers' `TrainingArguments`, peft's `LoraConfig`, and common habit."""

SYNONYMS = {
    "lr": ("learning_rate",),
    "lr_warmup_steps": ("warmup_steps", "num_warmup_steps"),
    "lr_decay_style": ("lr_scheduler_type", "scheduler"),
    "min_lr": ("min_learning_rate",),
    "local_batch_size": ("batch_size", "micro_batch_size", "per_device_train_batch_size", "train_batch_size"),
    "global_batch_size": ("gradient_accumulation_steps", "grad_accum", "accumulate_grad_batches"),
    "num_epochs": ("epochs", "num_train_epochs", "max_epochs"),
    "max_steps": ("steps", "train_steps", "num_steps"),
    "val_every_steps": ("eval_steps", "eval_every"),
    "ckpt_every_steps": ("save_steps", "save_every"),
    "log_every_steps": ("logging_steps", "log_every"),
    "keep_last": ("save_total_limit",),
    "max_norm": ("max_grad_norm", "grad_clip", "gradient_clip_val"),
    "sequence_length": ("seq_len", "seq_length", "max_seq_len", "max_seq_length", "max_length", "block_size"),
    "packed_sequence_size": ("packing",),
    "pretrained_model_name_or_path": ("model_name_or_path", "model_name", "model_id"),
    "attn_implementation": ("attention_implementation",),
    "dtype": ("torch_dtype", "bf16", "fp16"),
    "activation_checkpointing": ("gradient_checkpointing",),
    "dim": ("r", "lora_r", "rank"),
    "alpha": ("lora_alpha",),
    "dropout": ("lora_dropout",),
    "dir": ("output_dir", "run_dir"),
    "betas": ("adam_beta1", "adam_beta2"),
    "eps": ("adam_epsilon",),
}
_FIELD = {other: field for field, others in SYNONYMS.items() for other in others}


def synonym_of(name: str) -> str | None:
    """The field that is meant by `name`; None if it is no such word."""
    return _FIELD.get(name.lower().replace("-", "_"))
