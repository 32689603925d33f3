"""What a training step will need, without a GPU and without weights."""
