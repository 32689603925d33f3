import gc
import threading

from ac_moe.cache.stats import Stats, _Recorder


class Entry:
    pass


def test_counters() -> None:
    recorder = _Recorder()
    assert recorder.snapshot() == Stats()
    first, second = Entry(), Entry()
    recorder.kept(first, "a", 10)
    ledger = recorder.kept(second, "b", 30)
    recorder.served(ledger, 2)
    assert recorder.snapshot() == Stats(
        stored=2, stored_bytes=40, served=1, collectives_skipped=2, live_entries=2, live_bytes=40
    )
    del second
    recorder.reset()
    assert recorder.snapshot() == Stats(live_entries=1, live_bytes=10)
    del first
    assert recorder.snapshot() == Stats()


def test_counting_from_many_threads_loses_nothing() -> None:
    recorder = _Recorder()

    def work() -> None:
        for _ in range(500):
            entry = Entry()
            entry.cycle = entry  # so that a collection frees it, maybe while the counters are locked
            recorder.served(recorder.kept(entry, "a", 8), 1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert recorder.snapshot() == Stats(stored=2000, stored_bytes=16000, served=2000, collectives_skipped=2000)
