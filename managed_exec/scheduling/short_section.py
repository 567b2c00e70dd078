"""Entering a short section that a lock guards and that many threads come to all the time, so that they form no convoy.

    free -> entered; taken -> let others have the interpreter, and look again

A thread that blocks on a lock is given it while another has the interpreter. If that one comes to the section before
the first gets its turn, it blocks as well, and so does everybody from there on: each passage costs two switches of
threads (Blasgen, Gray, Mitoma, Price: The Convoy Phenomenon, 1979). A thread that asks again instead has the
interpreter when it gets the lock, and goes on.

It is the holder's section to end, and nobody else's: if that takes long, for its thread is not run, whoever wants in
blocks after all.
"""

from __future__ import annotations

import threading
import time

_MOST_LOOKS = 1000


class ShortSection:
    """A section that *lock* guards, for ``with``; others may still take the lock itself.

    For threads that get no signals, so for all but the main one: an interrupt between the lock and the section would
    leave it locked. Not reentrant.
    """

    def __init__(self, lock: threading.Lock) -> None:
        self._acquire = lock.acquire
        self._release = lock.release

    def __enter__(self) -> None:
        if self._acquire(False):
            return
        for _ in range(_MOST_LOOKS):
            time.sleep(0)
            if self._acquire(False):
                return
        self._acquire()

    def __exit__(self, *_: object) -> None:
        self._release()
