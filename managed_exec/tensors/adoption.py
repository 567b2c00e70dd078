"""What a task creates on its device becomes managed, whoever the operands are.

Managed operands see to that by themselves; this is for the calls that have none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._C import DisableTorchFunction
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

from managed_exec.tensors.managed import ManagedTensor


class AdoptingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's __init_subclass__ is not annotated
    """Run every kernel as those of managed tensors are run: again once room was made, large results managed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's is not annotated
        self.min_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with DisableTorchFunction():
            return ManagedTensor.dispatch(func, args, kwargs or {}, self._adopts)

    def _adopts(self, tensor: torch.Tensor) -> bool:
        """Return whether *tensor*, new or a view, is on a device and worth a record."""
        if tensor.is_cpu or tensor.layout is not torch.strided:
            return False
        return tensor.untyped_storage().nbytes() >= self.min_bytes

    @contextmanager
    def on(self) -> Iterator[None]:
        """Have the mode on in the block; at a quarter of the price of entering it as torch would."""
        _push_mode(self)
        try:
            yield
        finally:
            _pop_mode()
