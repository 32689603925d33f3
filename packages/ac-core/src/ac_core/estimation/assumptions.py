"""What an estimate takes for granted, in words."""

from dataclasses import dataclass

import torch

from ac_core.estimation.kernels import Fused

LINK = 25e9
"""Bytes a second between device and host, each way: of 32 GB/s that PCIe 4.0 x16 has, what copies reach."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What was asked of `estimate` or `plan`, in words; see there. rows: of the batch; None: not known. fused: what was
    taken for fused kernels. expert_load: None: how rows travel to other ranks is not simulated."""

    policy: str = "full"
    offload: str = "none"
    strategy: str = "none"
    dp_size: int = 1
    ep_size: int = 1
    expert_load: float | None = None
    gradient_accumulation_steps: int = 1
    rows: int | None = None
    loss: str = "plain"
    kernels: str = "plain"
    keep_output: bool = False
    fused: Fused | None = None
    device: str = "cuda"
    dtype: torch.dtype | None = torch.bfloat16
    compute_dtype: torch.dtype | None = None
    optimizer: str = "adamw"

    def __str__(self) -> str:
        dtype = "dtypes of the model" if self.dtype is None else str(self.dtype).removeprefix("torch.")
        if self.compute_dtype is not None:
            dtype += f" computing in {str(self.compute_dtype).removeprefix('torch.')}"
        ranks = self.strategy if self.strategy == "none" else f"{self.strategy} over {self.dp_size}"
        if self.ep_size > 1:
            ranks += f", experts over {self.ep_size}"
        microbatches = self.gradient_accumulation_steps
        several = f", {microbatches} microbatches a step" if microbatches > 1 else ""
        offload = "" if self.offload == "none" else f" with offload {self.offload}"
        return (
            f"policy {self.policy}{offload}, strategy {ranks}, loss {self.loss}, optimizer {self.optimizer}, {dtype}, "
            f"kernels {self.kernels}{several}"
        )


def assumptions(
    setting: Setting, *, uniform_routing: bool, experts: bool, no_padding: bool, host: bool
) -> tuple[str, ...]:
    """What holds for this setting."""
    said = ["bytes are those of tensors: without the allocator's rounding and reserve, and scratch inside of kernels"]
    said.append(
        "SDPA is a fused kernel, which keeps query, key, value, output and one fp32 number a row; with a dropout in "
        "it, the weights of all pairs"
    )
    if setting.fused is None:
        said.append("plain kernels: norms and gated activations are the operations that the model's code makes")
    else:
        said.append(
            f"fused kernels: {setting.fused.norms} norms and {setting.fused.gates} gated activations keep their inputs "
            "alone"
        )
    said.append(
        "the output of the model lives until the backward is over"
        if setting.keep_output
        else "of the output of the model the training loop holds the loss alone"
    )
    if setting.loss == "fused":
        said.append(
            "fused loss: chunks of at most 512 tokens (256 of fp32 products), gradients of hidden states and head made "
            "in the forward, that of the head summed in fp32"
        )
    if setting.optimizer in ("adamw", "sgd", "sgd+momentum"):
        at_once = "all parameters at once" if setting.device == "cuda" else "one parameter at a time"
        said.append(f"the optimizer steps on {at_once}; gradients are dropped after the step")
    said += _of_ranks(setting)
    if setting.compute_dtype is not None and setting.strategy != "fsdp2":
        said.append("autocast as on the CPU")
    if experts and setting.expert_load in (None, 1):
        said.append("routing is uniform: every expert gets as many tokens as any other")
    if no_padding:
        said.append("no image of the batch is padding: unknown pixels differ from what the model compares them with")
    if host:
        said.append(f"the link to the host moves {LINK / 1e9:g} GB/s each way, while the device computes")
    if uniform_routing:
        said.append("loops over experts run once for each expert")
    return tuple(said)


def _of_ranks(setting: Setting) -> list[str]:
    said = []
    if setting.gradient_accumulation_steps > 1:
        said.append(
            f"the step is the last of {setting.gradient_accumulation_steps} microbatches, and adds to gradients that "
            "are there; FLOPs are those of one"
        )
    if setting.strategy == "ddp":
        said.append("DDP's buckets hold every gradient a second time (gradient_as_bucket_view=False)")
    if setting.strategy == "fsdp2":
        said.append("each block is an FSDP2 unit, the rest is one that stays gathered through forward and backward")
    if setting.ep_size > 1:
        if setting.expert_load is None:
            said.append(
                "a rank's experts get as many rows as its own tokens take; the all-to-all's buffers do not count"
            )
        else:
            said.append(
                f"the rank's experts get {setting.expert_load:g} times the rows of an even share (expert_load); a rank "
                "that gets more takes more memory"
            )
    return said
