"""A mode that misbehaves on purpose, to test the runner; runs on the CPU alone."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING, Any

from .modes import AgainstCpu

if TYPE_CHECKING:
    import torch


class Faulty(AgainstCpu):
    """Misbehaves by the name of the operator."""

    name = "faulty"

    def applies(self, op: Any) -> bool:
        """Leave one operator out."""
        return op.name != "neg"

    def run(self, op: Any, sample: Any) -> None:
        """Do to this operator what its name stands for here; leave the others alone."""
        self._name = op.name
        print("noise of", op.name)
        if op.name == "abs":
            os.kill(os.getpid(), signal.SIGSEGV)
        elif op.name == "exp":
            os._exit(0)
        elif op.name == "sin":
            signal.pause()
        elif op.name == "cos":
            raise NotImplementedError("no cosine here")
        super().run(op, sample)

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """Give the device's tangent a wrong value."""
        fetched = super().fetch(tensor)
        return fetched + 1 if self._name == "tan" else fetched


class LeavesThread(AgainstCpu):
    """Starts a thread in the parent."""

    def prepare(self, device: str) -> None:
        """Leave a thread behind."""
        super().prepare(device)
        threading.Thread(target=threading.Event().wait, daemon=True).start()
