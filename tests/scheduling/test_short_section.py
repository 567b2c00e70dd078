"""Sections that many threads enter all the time: one at a time, and each in the end."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest
from conftest import eventually

from managed_exec.scheduling import short_section
from managed_exec.scheduling.short_section import ShortSection

WAIT_S = 60


@pytest.fixture
def frequent_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_one_thread_at_a_time(frequent_switches: None) -> None:
    lock = threading.Lock()
    section = ShortSection(lock)
    inside, most, entered = [0], [0], [0]

    def enter(holder: object) -> None:
        for _ in range(500):
            with holder:  # type: ignore[attr-defined]
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                entered[0] += 1
                inside[0] -= 1

    threads = [threading.Thread(target=enter, args=(section if i % 2 else lock,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert (entered, most, inside, lock.locked()) == ([3000], [1], [0], False)


def test_an_error_leaves_it() -> None:
    section = ShortSection(threading.Lock())
    with pytest.raises(ValueError, match="inside"), section:
        raise ValueError("inside")
    with section:
        pass


def test_waits_for_a_holder_that_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """After so many looks it blocks, and takes the processor from nobody."""
    looks = []
    monkeypatch.setattr(short_section.time, "sleep", looks.append)
    lock = threading.Lock()
    section, entered = ShortSection(lock), threading.Event()

    def enter() -> None:
        with section:
            entered.set()

    lock.acquire()
    thread = threading.Thread(target=enter)
    thread.start()
    assert eventually(lambda: len(looks) == short_section._MOST_LOOKS)
    assert not entered.is_set()
    lock.release()
    thread.join(WAIT_S)
    assert entered.is_set()
    assert looks == [0] * short_section._MOST_LOOKS
