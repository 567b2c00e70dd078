"""Streams, events, asynchronous copies, pinned memory and simulated time."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from managed_exec import sim

pytestmark = pytest.mark.usefixtures("devices")


def pinned(value: float, n: int = 64) -> torch.Tensor:
    return torch.full((n,), value).pin_memory()


def test_host_to_device_is_asynchronous_from_pinned_memory_only() -> None:
    stream = torch.sim.current_stream()
    source = pinned(1.0)
    event = torch.Event("sim")
    with sim.hold_stream(stream):
        target = source.to("sim", non_blocking=True)
        event.record(stream)
        assert not stream.query()
        assert not event.query()
        source.fill_(2.0)  # too early: the copy reads what is there when it runs
    event.synchronize()
    assert target.eq(2.0).all()
    assert event.query()


def test_device_to_host_is_asynchronous_into_pinned_memory() -> None:
    stream = torch.sim.current_stream()
    source = torch.ones(64, device="sim")
    with sim.hold_stream(stream):
        target = source.to("cpu", non_blocking=True)
        assert target.is_pinned()
        before = target.clone()
    stream.synchronize()
    assert target.eq(1.0).all()
    assert not before.eq(1.0).all()


def test_device_to_device_is_asynchronous_and_the_target_stream_waits() -> None:
    source = torch.ones(64, device="sim:0")
    target = torch.zeros(64, device="sim:1")
    with sim.hold_stream(torch.sim.current_stream(0)):
        target.copy_(source, non_blocking=True)
        assert not torch.sim.current_stream(1).query()
    assert (target + 1).eq(2.0).all()  # a kernel on the target's stream comes after the copy


def test_kernels_come_after_what_is_queued_on_their_stream() -> None:
    stream = torch.Stream("sim:0")
    done = threading.Event()
    results: list[float] = []
    source = pinned(3.0)

    def work() -> None:
        with stream:
            target = torch.zeros(64, device="sim")
            ready.set()
            target.copy_(source, non_blocking=True)
            results.append(target.sum().item())
        done.set()

    ready = threading.Event()
    with sim.hold_stream(stream):
        thread = threading.Thread(target=work)
        thread.start()
        ready.wait()
        assert not done.wait(0.05)
    thread.join()
    assert results == [3.0 * 64]


def test_a_wait_for_an_event_holds_across_streams() -> None:
    first, second = torch.Stream("sim:0"), torch.Stream("sim:0")
    source, back = pinned(5.0), pinned(0.0)
    target = torch.zeros(64, device="sim")
    with sim.hold_stream(first):
        with first:
            target.copy_(source, non_blocking=True)
            copied = first.record_event()
        with second:
            second.wait_event(copied)
            back.copy_(target, non_blocking=True)
        assert not second.query()
    second.synchronize()
    assert back.eq(5.0).all()


def test_a_source_freed_under_another_streams_copy_shows_as_poison() -> None:
    other = torch.Stream("sim:0")
    source, back = torch.ones(64, device="sim"), pinned(0.0)
    with sim.hold_stream(other):
        with other:
            back.copy_(source, non_blocking=True)
        del source
        torch.sim.empty_cache()
    other.synchronize()
    assert back.isnan().all()


def test_record_stream_keeps_the_source() -> None:
    other = torch.Stream("sim:0")
    source, back = torch.ones(64, device="sim"), pinned(0.0)
    with sim.hold_stream(other):
        with other:
            back.copy_(source, non_blocking=True)
        source.record_stream(other)
        address = source.data_ptr()
        del source
        assert torch.empty(64, device="sim").data_ptr() != address
    other.synchronize()
    assert back.eq(1.0).all()


def test_a_free_takes_effect_in_the_order_of_its_own_stream() -> None:
    stream = torch.Stream("sim:0")
    back = pinned(0.0)
    with sim.hold_stream(stream), stream:
        source = torch.ones(64, device="sim")
        back.copy_(source, non_blocking=True)
        del source
    stream.synchronize()
    assert back.eq(1.0).all()


def test_pinned_blocks_are_powers_of_two_and_not_reused_during_a_copy() -> None:
    stream = torch.sim.current_stream()
    source = torch.ones(100_000, dtype=torch.uint8).pin_memory()  # no other test leaves a free block of this size
    assert source.is_pinned()
    assert source[100:].is_pinned()
    assert not torch.ones(3000).is_pinned()
    address = source.data_ptr()
    with sim.hold_stream(stream):
        target = source.to("sim", non_blocking=True)
        del source
        other = torch.zeros(120_000, dtype=torch.uint8).pin_memory()  # rounds to 128 KiB as well
        assert other.data_ptr() != address
    stream.synchronize()
    assert target.eq(1).all()
    again = torch.empty(2**17, dtype=torch.uint8, pin_memory=True)
    assert again.data_ptr() == address


def test_pageable_memory_is_copied_before_the_call_returns() -> None:
    source = torch.ones(64)
    target = source.to("sim", non_blocking=True)
    source.fill_(2.0)
    assert target.eq(1.0).all()


def test_streams_belong_to_threads() -> None:
    stream = torch.Stream("sim:1")
    seen: list[object] = []
    with stream:
        assert torch.sim.current_stream(1) == stream
        thread = threading.Thread(target=lambda: seen.append(torch.sim.current_stream(1)))
        thread.start()
        thread.join()
    assert seen == [torch.sim.default_stream(1)]
    assert torch.sim.current_stream(1) == torch.sim.default_stream(1)
    assert torch.sim.current_device() == 0


def test_events_measure_simulated_kernel_time() -> None:
    begin, end = torch.Event("sim", enable_timing=True), torch.Event("sim", enable_timing=True)
    begin.record()
    sim.run_kernel(0.02)
    end.record()
    assert begin.elapsed_time(end) >= 20
    untimed = torch.Event("sim")
    untimed.record()
    with pytest.raises(ValueError, match="enable_timing"):
        begin.elapsed_time(untimed)


def test_links_take_bytes_over_bandwidth_one_copy_at_a_time() -> None:
    sim.enable(2, "1MiB", host_bandwidth=1e6, peer_bandwidth=2e6)
    data = torch.zeros(10_000, dtype=torch.uint8)
    started = time.monotonic()
    on_device = data.to("sim")
    assert time.monotonic() - started >= 0.01
    started = time.monotonic()
    moved = on_device.to("sim:1")
    assert time.monotonic() - started >= 0.005
    streams = [torch.Stream("sim:0") for _ in range(2)]
    source = data.pin_memory()
    targets = []
    started = time.monotonic()
    for stream in streams:
        with stream:
            targets.append(source.to("sim", non_blocking=True))
    for stream in streams:
        stream.synchronize()
    assert time.monotonic() - started >= 0.02
    del on_device, moved, targets


def test_a_device_runs_one_kernel_at_a_time() -> None:
    started = time.monotonic()
    threads = [threading.Thread(target=sim.run_kernel, args=(0.02,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - started >= 0.06


def test_kernel_time_is_the_threads_own() -> None:
    tensor = torch.zeros(1, device="sim")
    with sim.kernel_time(0.02):
        started = time.monotonic()
        tensor.add_(1)
        assert time.monotonic() - started >= 0.02
    sim.faults.clear()
    del tensor
    sim.enable(1, "1MiB", kernel_s=0.01)
    started = time.monotonic()
    torch.zeros(1, device="sim")
    assert time.monotonic() - started >= 0.01
    with pytest.raises(ValueError, match="seconds"), sim.kernel_time(-1):
        pass
