"""Training: everything that a run does after its recipe has been read."""
