"""Heads whose weight is spread over ranks: by FSDP2, by vocabulary-parallel tensor parallelism, or by both."""

from ac_loss.sharded.method import add_loss_method

__all__ = ["add_loss_method"]
