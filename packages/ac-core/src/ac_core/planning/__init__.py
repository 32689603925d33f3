"""Choosing, block by block, the cheapest checkpointing that fits a memory budget."""
