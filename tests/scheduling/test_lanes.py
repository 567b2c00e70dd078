"""Lanes below the pool: what they are told, how they end, and that the last worker ends them all."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import eventually
from processes import WAIT_S, lane_pids, nothing_left_by_processes

from managed_exec import MemoryPolicy
from managed_exec.devices import CpuDevice
from managed_exec.options import TaskOptions
from managed_exec.scheduling import lane as lane_module
from managed_exec.scheduling.lane_process import _failure, receive_descriptors, send_descriptors
from managed_exec.scheduling.lanes import Lanes, _shared_policy
from managed_exec.task import Task

pytestmark = pytest.mark.timeout(300)  # starting a process imports torch
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    with nothing_left_by_processes():
        yield


class Frozen(Exception):
    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"cannot assign to {name!r}")


def test_error_that_lets_nothing_be_set() -> None:
    error = lane_module.raised_in(_failure(Frozen("mine")))
    assert isinstance(error, Frozen)
    assert "mine" in str(error.__cause__)


def make_lanes(max_workers: int = 2) -> Lanes:
    return Lanes((CpuDevice(),), None, max_workers, None, None, (), lambda: None)


def task_of(fn: Callable[..., Any], *args: Any, options: TaskOptions | None = None) -> Task:
    return Task(1, fn, args, {}, None, None, None, options or TaskOptions())


@pytest.mark.parametrize("count", [0, 1, 99, 100, 101, 250])
def test_descriptors_arrive_in_their_order(count: int) -> None:
    ours, theirs = socket.socketpair()
    made = [os.memfd_create(str(i)) for i in range(count)]
    try:
        send_descriptors(ours, made)
        received = receive_descriptors(theirs, count)
        assert [os.path.sameopenfile(a, b) for a, b in zip(made, received, strict=True)] == [True] * count
        assert not any(os.get_inheritable(descriptor) for descriptor in received)
        made += received
        with pytest.raises(BlockingIOError):
            receive_descriptors(theirs, 1)
    finally:
        for descriptor in made:
            os.close(descriptor)
        ours.close()
        theirs.close()


@pytest.mark.parametrize(
    ("limit", "shared"),
    [(None, 100), (0.5, 16), ("60B", 20), (90, 30), (2, 1)],
    ids=["none", "share", "text", "bytes", "few"],
)
def test_policy_is_divided(limit: float | int | str | None, shared: int) -> None:
    policy = _shared_policy(MemoryPolicy(limit=limit, host_limit="1KiB", disk_limit=None, wait_s=3), 3, 8)
    assert policy.limit_bytes(100) == shared
    assert policy.host_limit_bytes == 128
    assert (policy.disk_limit_bytes, policy.wait_s) == (None, 3)


def test_last_worker_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that a thread of a task keeps from ending; and a lane that is idle serves whoever comes."""
    monkeypatch.setattr(lane_module, "END_GRACE_S", 0.5)
    lanes = make_lanes()
    together, done = threading.Barrier(2), threading.Event()
    seen: list[Any] = []

    def first() -> None:
        seen.append(lanes.run(task_of(os.getpid), 0, nothing, nothing))
        together.wait(WAIT_S)

    def second() -> None:
        together.wait(WAIT_S)
        seen.append(lanes.run(task_of(leave_a_thread), 0, nothing, nothing))
        done.wait(WAIT_S)

    threads = [threading.Thread(target=lanes.serve, args=(work,)) for work in (first, second)]
    for thread in threads:
        thread.start()
    threads[0].join(WAIT_S)
    assert eventually(lambda: len(seen) == 2, WAIT_S)
    assert seen == [(lane_pids()[0], None)] * 2, "one process, still there while a worker is"
    done.set()
    threads[1].join(WAIT_S)
    assert lane_pids() == []


def nothing() -> None:
    """Do nothing."""


def leave_a_thread() -> int:
    threading.Thread(target=threading.Event().wait).start()
    return os.getpid()


def test_task_that_cannot_be_sent_starts_no_process() -> None:
    lanes = make_lanes()
    result, error = lanes.run(task_of(print, threading.Lock()), 0, nothing, nothing)
    assert result is None
    assert "task 1 (print): argument 1, a lock, cannot be sent to another process" in str(error)
    assert not lanes._existing
    assert lane_pids() == []
