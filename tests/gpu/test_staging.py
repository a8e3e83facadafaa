"""The courier: mapped weights reach the buffers whole and in order, and errors reach the asker."""

from __future__ import annotations

import threading
import time
import weakref
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file

from residency.gpu.file_mapping import is_file_backed
from residency.gpu.host_memory import allocate, copy_into
from residency.gpu.staging import Courier

if TYPE_CHECKING:
    from pathlib import Path


def storage_of(size: int, value: int) -> torch.UntypedStorage:
    return torch.full((size,), value, dtype=torch.uint8).untyped_storage()


def content(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


class Gate:
    """Copies that wait until they may begin."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_open = threading.Event()
        self.threads: set[int] = set()

        def copy(target: torch.UntypedStorage, source: torch.UntypedStorage, *, offset_bytes: int = 0) -> None:
            self.threads.add(threading.get_ident())
            assert self.is_open.wait(10)
            copy_into(target, source, offset_bytes=offset_bytes)

        monkeypatch.setattr("residency.gpu.staging.copy_into", copy)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


def test_mapped_weights_reach_the_buffer_at_their_offsets(tmp_path: Path) -> None:
    saved = {name: torch.randn(3000 + index) for index, name in enumerate("abc")}
    save_file(saved, tmp_path / "model.safetensors")
    weights = load_file(tmp_path / "model.safetensors")
    buffer, parts, offset = allocate(64 * 1024), [], 0
    for weight in weights.values():
        parts.append((weight.untyped_storage(), offset))
        offset += 16 * 1024
    with Courier() as courier:
        num_bytes = courier.fetch(parts, buffer).result(10)
    assert num_bytes == sum(weight.nbytes for weight in weights.values())
    for (name, _), (_, start) in zip(weights.items(), parts, strict=True):
        part = content(buffer)[start : start + saved[name].nbytes].view(torch.float32)
        assert torch.equal(part, saved[name])
    # Reading leaves the weights where they are: in the file.
    assert all(is_file_backed(weight.data_ptr(), weight.nbytes) for weight in weights.values())


def test_the_asker_goes_on_while_the_courier_waits_for_pages(gate: Gate) -> None:
    buffer = allocate(16)
    with Courier() as courier:
        done = courier.fetch([(storage_of(16, 7), 0)], buffer)
        assert not done.done()
        gate.is_open.set()
        assert done.result(10) == 16
    assert bool((content(buffer) == 7).all())
    assert threading.get_ident() not in gate.threads


def test_errands_are_done_one_after_the_other_in_order(gate: Gate) -> None:
    buffer = allocate(1)
    with Courier(max_pending=8) as courier:
        done = [courier.fetch([(storage_of(1, value), 0)], buffer) for value in range(8)]
        gate.is_open.set()
        assert [each.result(10) for each in done] == [1] * 8
    assert int(content(buffer)[0]) == 7
    assert len(gate.threads) == 1


def test_no_more_errands_are_taken_than_there_are_buffers(gate: Gate) -> None:
    buffers = [allocate(4) for _ in range(3)]
    with Courier() as courier:
        for buffer in buffers[:2]:
            courier.fetch([(storage_of(4, 1), 0)], buffer)
        started_s = time.monotonic()
        with pytest.raises(TimeoutError, match="not ended within 0.1 s"):
            courier.fetch([(storage_of(4, 1), 0)], buffers[2], wait_s=0.1)
        assert time.monotonic() - started_s < 5
        gate.is_open.set()
        assert courier.fetch([(storage_of(4, 1), 0)], buffers[2]).result(10) == 4


def test_an_error_reaches_the_asker_and_the_next_errand_is_done(gate: Gate) -> None:
    gate.is_open.set()
    with Courier() as courier:
        for _ in range(5):  # More often than there are buffers: an error gives its place back.
            with pytest.raises(ValueError, match="do not fit"):
                courier.fetch([(storage_of(8, 1), 1)], allocate(8)).result(10)
        assert courier.fetch([(storage_of(8, 1), 0)], allocate(8)).result(10) == 8


def test_an_errand_that_is_no_longer_wanted_is_left_out(gate: Gate) -> None:
    first, second = allocate(1), allocate(1)
    with Courier() as courier:
        done = courier.fetch([(storage_of(1, 5), 0)], first)
        dropped = courier.fetch([(storage_of(1, 5), 0)], second)
        assert dropped.cancel()
        gate.is_open.set()
        assert done.result(10) == 1
    assert (int(content(first)[0]), int(content(second)[0])) == (5, 0)


def test_closing_ends_the_thread_and_tells_whoever_still_waits(gate: Gate) -> None:
    courier = Courier()
    running = courier.fetch([(storage_of(1, 5), 0)], allocate(1))
    waiting = courier.fetch([(storage_of(1, 5), 0)], allocate(1))
    while not gate.threads:
        time.sleep(0.001)
    closing = threading.Timer(0.05, gate.is_open.set)
    closing.start()
    courier.close()
    assert running.result(10) == 1
    with pytest.raises(RuntimeError, match="closed before this copy"):
        waiting.result(10)
    with pytest.raises(RuntimeError, match="the courier is closed"):
        courier.fetch([], allocate(1))
    courier.close()
    closing.join()
    assert not [thread for thread in threading.enumerate() if thread.name == "residency-courier"]


def test_what_was_fetched_is_not_kept_alive(gate: Gate) -> None:
    gate.is_open.set()
    with Courier() as courier:
        for fits in (True, False):
            source = torch.ones(8, dtype=torch.uint8)
            watched = weakref.ref(source.untyped_storage())
            done = courier.fetch([(source.untyped_storage(), 0)], allocate(8 if fits else 4))
            assert (done.exception(10) is None) == fits
            del done, source
            deadline = time.monotonic() + 10
            while watched() is not None and time.monotonic() < deadline:
                time.sleep(0.001)
            assert watched() is None
