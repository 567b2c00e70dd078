"""Pairs of a managed tensor and the plain tensor of the CPU that says what it must be: *cells*.

Kernels of the simulator are the CPU's, so values are compared by their bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from managed_exec.tensors.managed import ManagedTensor

Call = Callable[..., Any]


@dataclass
class Storage:
    """What the model knows of a storage."""

    pins: int = 0
    shared: bool = False  # with other lanes: never written, pinned or exported
    exported: bool = False  # for good
    in_graph: bool = False  # other lanes keep off: versions are compared


@dataclass(eq=False)
class Cell:
    """A managed tensor and the plain tensor of the CPU with what must be its values."""

    managed: ManagedTensor
    model: torch.Tensor
    version_gap: int = 0
    array: Any = None  # a NumPy array on the managed tensor's memory
    model_array: Any = None

    def __post_init__(self) -> None:
        self.device = self.managed.device
        self.is_usable = True  # torch refuses anything but being dropped to views whose base was written to
        self.version_gap = self.managed._version - self.model._version

    @property
    def key(self) -> int:
        return self.model.untyped_storage()._cdata

    def check_form(self) -> None:
        assert type(self.managed) is ManagedTensor
        assert self.managed.device == self.device
        actual, expected = Outcome.of(facts, self.managed), Outcome.of(facts, self.model)
        assert actual == expected, f"{actual} != {expected}"
        self.is_usable = expected.error is None
        assert self.managed._version - self.model._version == self.version_gap

    def check(self) -> None:
        self.check_form()
        if not self.is_usable:
            return
        assert bits(self.managed) == bits(self.model), f"{self.managed.tolist()} != {self.model.tolist()}"
        if self.model.is_leaf:
            assert (self.managed.grad is None) == (self.model.grad is None)
            if self.model.grad is not None:
                assert bits(self.managed.grad) == bits(self.model.grad)


def facts(tensor: torch.Tensor) -> tuple[object, ...]:
    return (
        *(tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype),
        *(tensor.is_leaf, tensor.requires_grad, tensor.is_conj(), tensor.is_neg()),
    )


def bits(tensor: torch.Tensor) -> bytes:
    # Of a clone, for torch never frees the memory of a tensor that has been an array.
    return tensor.detach().cpu().clone().resolve_conj().resolve_neg().contiguous().numpy().tobytes()


@dataclass
class Outcome:
    """What a call returned, or the type and text of what it raised: an exception would keep tensors alive."""

    value: Any = None
    error: type[BaseException] | None = None
    text: str = ""

    @staticmethod
    def of(call: Call, *args: Any) -> Outcome:
        try:
            return Outcome(call(*args))
        except Exception as error:
            return Outcome(None, type(error), str(error))


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for element in value for tensor in tensors_in(element)] if isinstance(value, (list, tuple)) else []
