"""The data of a run: from what the section `dataset` names to batches of tensors."""
