"""What was saved, what was recomputed, and that the numbers are those of the model without checkpointing."""
