"""A router that decides once: its decisions are pinned, its counters counted once, and a difference is an error."""

from ac_moe.routing.check import Routing, check
from ac_moe.routing.counters import counted_once
from ac_moe.routing.pins import pin
from ac_moe.routing.sites import site_of

__all__ = ["Routing", "check", "counted_once", "pin", "site_of"]
