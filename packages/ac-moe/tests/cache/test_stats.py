import gc
import threading

import torch
from ac_moe_local import LocalLayer, Reversal, each, inputs, non_reentrant

import ac_moe
from ac_moe.cache.combine import combine
from ac_moe.cache.region import Site, claim
from ac_moe.cache.stats import Counts, Stats, _Recorder


class Entry:
    pass


def test_counters() -> None:
    recorder = _Recorder()
    assert recorder.snapshot() == Stats()
    first, second, pin = Entry(), Entry(), Entry()
    recorder.kept(first, "a", 10)
    ledger = recorder.kept(second, "b", 30)
    recorder.kept(pin, "b", 7, pinned=True)
    recorder.served(ledger, 2, gemms=1)
    stats = recorder.snapshot()
    a = Counts(stored=1, stored_bytes=10, live_entries=1, live_bytes=10)
    b = Counts(
        stored=1,
        stored_bytes=30,
        served=1,
        collectives_skipped=2,
        gemms_skipped=1,
        live_entries=1,
        live_bytes=30,
        pinned=1,
        pinned_bytes=7,
        live_pinned=1,
        live_pinned_bytes=7,
    )
    assert stats.layers == {"a": a, "b": b}
    for name in vars(a):
        assert getattr(stats, name) == getattr(a, name) + getattr(b, name)
    del second, pin
    recorder.reset()
    assert recorder.snapshot() == Stats(live_entries=1, live_bytes=10)
    assert list(recorder.snapshot().layers) == ["a"]
    del first
    assert recorder.snapshot() == Stats()  # it was stored before the reset, and is no waste of after it
    assert recorder.snapshot().layers == {}


def test_unserved_is_what_died_without_use() -> None:
    recorder = _Recorder()
    used, wasted = Entry(), Entry()
    ledger = recorder.kept(used, "used", 1)
    recorder.kept(wasted, "wasted", 1)
    assert recorder.snapshot().only_memory == ()  # it may still be served
    recorder.served(ledger, 1)
    del used, wasted
    stats = recorder.snapshot()
    assert stats.unserved == 1
    assert stats.only_memory == ("wasted",)
    again = Entry()
    recorder.served(recorder.kept(again, "wasted", 1), 1)
    assert recorder.snapshot().only_memory == ()  # not always for nothing


def test_a_cache_that_only_costs_memory_is_told() -> None:
    """Residual alone: early stop ends that block's recompute before its combine, which nothing comes after."""

    class Added(LocalLayer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + combine(self.experts(x), Reversal(), self.site)

    ac_moe.reset_stats()
    model = [LocalLayer(name="layers.0.moe"), Added(name="layers.1.moe")]
    each(non_reentrant("moe_tail"), model)(inputs(1)[0].requires_grad_()).sum().backward()
    stats = ac_moe.stats()
    assert stats.only_memory == ("layers.1.moe",)
    assert str(stats) == (
        "layer         stored  served  KiB kept  collectives  GEMMs skipped  live\n"
        "layers.0.moe       1       1       0.4            1              1     0\n"
        "layers.1.moe       1       0       0.4            0              0     0\n"
        "total              2       1       0.9            1              1     0\n"
        "only memory, nothing served: layers.1.moe: the recompute ended before the combine (PyTorch's early stop: "
        "nothing after it needs its output), or no backward came; mode 'none' does the same without the memory"
    )


def test_pins_are_counted_apart() -> None:
    ac_moe.reset_stats()
    forward, recompute = ac_moe.context_fn("none", pin_routing=True)()
    x = inputs(1)[0]
    with forward:
        claim(Site("Router", "router"), "logits").keep(x)
        claim(Site("Router", "router"), "layout").keep((1, 2))
        assert claim(Site("Layer"), "combine").keepers == []
    stats = ac_moe.stats()
    assert (stats.stored, stats.live_entries) == (0, 0)
    assert (stats.pinned, stats.live_pinned, stats.live_pinned_bytes) == (2, 2, x.nbytes)
    _, total, routing = str(stats).splitlines()  # a router is no row of a table of combine outputs
    assert total.startswith("total ")
    assert routing == f"routing kept: {x.nbytes / 1024:.1f} KiB"
    del forward, recompute
    assert ac_moe.stats().live_pinned == 0


def test_counting_from_many_threads_loses_nothing() -> None:
    recorder = _Recorder()

    def work() -> None:
        for _ in range(500):
            entry = Entry()
            entry.cycle = entry  # so that a collection frees it, maybe while the counters are locked
            recorder.served(recorder.kept(entry, "layer", 8), 1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert recorder.snapshot() == Stats(stored=2000, stored_bytes=16000, served=2000, collectives_skipped=2000)
