"""The raw side of `append_vs_raw`: the same writes and syncs, as fast as the disk allows."""

import store_appends
from store_appends import Cadence, written_seconds


def test_raw_writes_are_those_of_the_plan(tmp_path, monkeypatch):
    path = tmp_path / "raw"
    syncs = []
    monkeypatch.setattr(store_appends.os, "fdatasync", lambda _: syncs.append(path.stat().st_size))
    data = memoryview(bytes(100))
    seconds, processor_seconds = written_seconds(path, [[data[:30], data[:5]], [data]])
    assert seconds > 0
    assert processor_seconds >= 0
    assert syncs == [35, 135]
    assert not path.exists()


def test_raw_side_is_the_fastest_try(tmp_path, monkeypatch):
    tries = iter([(3.0, 0.1), (1.0, 0.3), (2.0, 0.2)])
    monkeypatch.setattr(store_appends, "written_seconds", lambda *_: next(tries))
    assert Cadence().repeat_without_broker(tmp_path / "raw") == (1.0, 0.3)
    assert list(tries) == []
