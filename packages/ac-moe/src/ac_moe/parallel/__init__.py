"""Hugging Face MoE models with their experts shared out over the ranks of a device mesh."""
