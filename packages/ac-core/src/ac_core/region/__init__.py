"""A checkpointed block: the callable in place of its forward, and what its recompute has to see as the forward did."""
