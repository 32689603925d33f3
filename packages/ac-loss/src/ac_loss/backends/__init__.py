"""Implementations of the loss. Each computes a :class:`ac_loss._job.Job` on tensors that are already checked."""
