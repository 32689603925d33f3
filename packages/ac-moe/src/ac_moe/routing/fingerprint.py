"""What tells one routing from another, small enough to keep and to send."""

import torch


def routing_checksum(routing: torch.Tensor, num_experts: int) -> torch.Tensor:
    """int64 scalar: a sum, modulo 2^64, of a hash of each (slot, expert) that is routed to.

    Args:
        routing: integer `[tokens, top_k]` expert ids, whose slots are the places in it, or a bool `[tokens, experts]`
            map, whose slots are the tokens.
    """
    flat = routing.reshape(-1)
    places = torch.arange(flat.numel(), device=flat.device)
    if routing.dtype == torch.bool:
        return (_mixed(places) * flat).sum()
    return _mixed(places * num_experts + flat.long()).sum()


def routing_numbers(routing: torch.Tensor, num_experts: int, *, checksum: bool) -> torch.Tensor:
    """int64 `[2 + num_experts]`: tokens, checksum (0 if not asked for), rows to each expert. No wait for the device.

    Args:
        routing: as for `routing_checksum`.
    """
    if routing.dtype == torch.bool:
        rows = routing.sum(0)
    else:
        # Counted by where each expert begins: unlike bincount this neither waits for the device nor adds atomically.
        ids = torch.sort(routing.reshape(-1).long()).values
        rows = torch.searchsorted(ids, torch.arange(num_experts + 1, device=ids.device)).diff()
    tokens = torch.full((1,), routing.shape[0], device=routing.device)
    told = routing_checksum(routing, num_experts).reshape(1) if checksum else torch.zeros_like(tokens)
    return torch.cat([tokens, told, rows])


def _mixed(values: torch.Tensor) -> torch.Tensor:
    """The mix of splitmix64."""
    for multiplier, shift in _SPLITMIX64:
        values = (values ^ (values >> shift)) * multiplier
    return values ^ (values >> 31)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= (1 << 63) else value


# Steele, Lea, Flood: Fast splittable pseudorandom number generators (2014), constants as signed 64-bit numbers.
_SPLITMIX64 = ((_signed(0xBF58476D1CE4E5B9), 30), (_signed(0x94D049BB133111EB), 27))
