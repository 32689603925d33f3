"""Training under a checkpointing policy against training without, over the generation classes of transformers."""
