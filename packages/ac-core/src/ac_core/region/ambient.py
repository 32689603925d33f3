"""Switches of the process or thread that change what a block computes.

A switch that is set around the forward alone, such as `with sdpa_kernel(SDPBackend.MATH): loss = model(batch)`, is back
in its old place when the backward recomputes. So each forward notes the switches, in a few microseconds, and a
recompute sets those that have changed, for as long as it runs.

Noted is what can choose another kernel or change a number. Left out are cuBLAS's reduced-precision reductions and the
choice of BLAS and linear-algebra libraries, which are set once a run; flush-denormal, which cannot be read; FP8 of
Transformer Engine, which has contexts of its own for checkpointing.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import backends

from ac_core.region.layout import Layout

_Switch = tuple[Callable[[], Any], Callable[[Any], None]]
"""How a switch is read and how it is set."""

_Cache = tuple[dict[str, Any], dict[str, Any]]
"""A cache and what was in it."""
_Noted = tuple[list[Any], list[_Cache]]

_cuda, _cudnn, _mkldnn = backends.cuda, backends.cudnn, backends.mkldnn
_PRECISIONS = (_cuda.matmul, _mkldnn.matmul, _cudnn.conv, _mkldnn.conv)


def _precisions() -> tuple[str, ...]:
    return tuple([place.fp32_precision for place in _PRECISIONS])


def _set_precisions(wanted: tuple[str, ...]) -> None:
    # Over the older setting first: while the two contradict each other, reading the older one raises, and code in the
    # block may read it.
    older = {("tf32", "bf16"): "medium"}.get(wanted[:2], "high" if wanted[0] == "tf32" else "highest")
    torch.set_float32_matmul_precision(older)
    for place, precision in zip(_PRECISIONS, wanted, strict=True):
        place.fp32_precision = "none"  # as `torch.backends.fp32_precision` says
        if place.fp32_precision != precision:
            place.fp32_precision = "ieee" if precision == "none" else precision


# The checkpoint restores autocast of the CPU and of one device type.
_AUTOCAST_DEVICES = tuple(d for d in ("cuda", "xpu", "mps", "hpu", "mtia") if torch.amp.is_autocast_available(d))


def _autocast() -> tuple[torch.dtype | None, ...]:
    enabled, dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
    return tuple([dtype(device) if enabled(device) else None for device in _AUTOCAST_DEVICES])


def _set_autocast(wanted: tuple[torch.dtype | None, ...]) -> None:
    for device, dtype in zip(_AUTOCAST_DEVICES, wanted, strict=True):
        torch.set_autocast_enabled(device, dtype is not None)
        if dtype is not None:
            torch.set_autocast_dtype(device, dtype)


def _attribute(place: Any, name: str) -> _Switch:
    return partial(getattr, place, name), partial(setattr, place, name)


def _private(getter: str, setter: str) -> list[_Switch]:
    # The order in which `sdpa_kernel(..., set_priority=True)` tries the backends, and whether that of a plugged-in
    # device is allowed: nothing public reads them.
    pair = getattr(torch._C, getter, None), getattr(torch._C, setter, None)
    return [pair] if None not in pair else []  # type: ignore[list-item]


_SWITCHES: tuple[_Switch, ...] = (
    (_cuda.flash_sdp_enabled, _cuda.enable_flash_sdp),
    (_cuda.mem_efficient_sdp_enabled, _cuda.enable_mem_efficient_sdp),
    (_cuda.math_sdp_enabled, _cuda.enable_math_sdp),
    (_cuda.cudnn_sdp_enabled, _cuda.enable_cudnn_sdp),
    (_cuda.fp16_bf16_reduction_math_sdp_allowed, _cuda.allow_fp16_bf16_reduction_math_sdp),
    *_private("_get_overrideable_sdp_enabled", "_set_sdp_use_overrideable"),
    *_private("_get_sdp_priority_order", "_set_sdp_priority_order"),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (torch.get_num_threads, torch.set_num_threads),  # sums are split by it
    _attribute(_cudnn, "enabled"),
    _attribute(_cudnn, "benchmark"),
    _attribute(_cudnn, "deterministic"),
    _attribute(_mkldnn, "enabled"),
    (_precisions, _set_precisions),
    (_autocast, _set_autocast),
)
_GETTERS = tuple(getter for getter, _ in _SWITCHES)


def _read() -> list[Any]:
    return [getter() for getter in _GETTERS]


def _set(wanted: list[Any], now: list[Any]) -> None:
    for (_, setter), value, current in zip(_SWITCHES, wanted, now, strict=True):
        if value != current:
            setter(value)


_ENGINES = (
    "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention",
    "transformer_engine.pytorch.attention",  # in older versions
)


def _engine_caches() -> list[dict[str, Any]]:
    """Where Transformer Engine has been imported: its memory of the last attention call's parameters and of the backend
    that it chose for them. An attention call that finds other parameters there chooses anew, with more operations."""
    caches = []
    for name in _ENGINES:
        module = sys.modules.get(name)
        cache = None if module is None else getattr(module, "_attention_backends", None)
        if isinstance(cache, dict) and all(cache is not other for other in caches):
            caches.append(cache)
    return caches


class AmbientSwitches:
    """The part of a block's state that is outside it. A `Part`, see `region/state.py`."""

    def note(self, _layout: Layout) -> _Noted:
        return _read(), [(cache, dict(cache)) for cache in _engine_caches()]

    def settle(self, _noted: _Noted, _failed: bool) -> None:
        pass

    def restore(self, noted: _Noted) -> _Noted:
        switches, engines = noted
        live = _read()
        if live != switches:
            _set(switches, live)
        taken = [(cache, dict(cache)) for cache, _ in engines]
        _refill(engines)
        return live, taken

    def release(self, noted: _Noted, taken: _Noted) -> None:
        (switches, _), (live, engines) = noted, taken
        if live != switches:
            _set(live, switches)
        _refill(engines)


def _refill(caches: list[_Cache]) -> None:
    for cache, contents in caches:
        cache.clear()
        cache.update(contents)
