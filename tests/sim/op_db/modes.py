"""What is done with one operator and one sample.

A mode is a class with ``name``, ``prepare``, ``applies`` and ``run``. Most are a subclass of ``AgainstCpu`` that
overrides one or more of ``device_of`` (where operands go), ``ready`` (what happens to placed operands: wrapped,
spilled), ``around_call`` and ``around_backward`` (faults switched on, outputs spilled first) and ``fetch``.
A mode defined elsewhere is named ``package.module:Class`` on the command line.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from typing import TYPE_CHECKING, Any, Protocol

import torch

from .compare import TOLERANCE, UNINITIALISED, Tolerance, WrongValue, compare
from .entries import SEED
from .operands import STAYS_ON_CPU, Placement, leaves, walk

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


class SkipSample(Exception):
    """The CPU itself raised: the sample says nothing about the device."""


class Mode(Protocol):
    """One way to put an operator to the test."""

    name: str
    requires_grad: bool  # of the samples

    def prepare(self, device: str) -> None:
        """Make the device ready, once, in the parent; must leave no thread behind, because children are forked."""

    def applies(self, op: Any) -> bool:
        """Say whether the mode concerns this operator; asked in the parent."""

    def run(self, op: Any, sample: Any) -> None:
        """Run one sample, in a child; raise ``WrongValue``, ``SkipSample`` or whatever the device raises."""


class AgainstCpu:
    """Runs a sample on the CPU and on the device, and compares the results and the operands after the call."""

    name = "forward"
    requires_grad = False

    def prepare(self, device: str) -> None:
        """Enable the device."""
        if device.split(":")[0] == "sim":
            from managed_exec import sim

            sim.enable(devices=4, memory="1GiB")
        self.device = torch.device(device)
        if self.device.index is None and self.device.type != "cpu":
            self.device = torch.device(self.device.type, 0)

    def applies(self, op: Any) -> bool:
        """Concern every operator."""
        return True

    def device_of(self, index: int) -> torch.device:
        """Return the device of the ``index``-th operand storage."""
        return self.device

    def ready(self, tensor: torch.Tensor) -> torch.Tensor:
        """Do what the mode does to an operand, or a cotangent, once it is on the device; it wants no gradient yet."""
        return tensor

    def around_call(self, operands: list[torch.Tensor]) -> AbstractContextManager[object]:
        """Enclose the call on the device."""
        return contextlib.nullcontext()

    def around_backward(self, outputs: list[torch.Tensor]) -> AbstractContextManager[object]:
        """Enclose the backward pass on the device."""
        return contextlib.nullcontext()

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a plain tensor on the CPU."""
        return tensor.detach().to("cpu")

    def run(self, op: Any, sample: Any) -> None:
        """Compare one sample."""
        self._seed()
        before = torch.get_rng_state()
        arguments = walk(_arguments(sample), Placement(lambda index: torch.device("cpu")))
        try:
            expected = _call(op, arguments)
            drew = not torch.equal(before, torch.get_rng_state())
            expected_gradients = self._gradients(expected, arguments, sample) if self.requires_grad else None
        except Exception as error:
            raise SkipSample(f"on the CPU: {type(error).__name__}: {error}") from error

        self._seed()
        placement = Placement(self.device_of, self.ready, integers_stay=op.name in STAYS_ON_CPU)
        placed = walk(_arguments(sample), placement)
        used = placement.used
        del placement  # with its references to what it placed
        with self.around_call(_tensors(placed)):
            actual = _call(op, placed)
        values = op.name not in UNINITIALISED and (not drew or self._draws_like_cpu())
        if used:
            self._check_device(_tensors(actual))
        compared = functools.partial(self._compare, values=values, tolerance=TOLERANCE.get(op.name))
        compared(actual, expected, "result")
        compared(_tensors(placed), _tensors(arguments), "operand after the call")
        if self.requires_grad:
            gradients = self._gradients(actual, placed, sample, on_device=True)
            compared(gradients, expected_gradients, "gradient")

    def _seed(self) -> None:
        """Seed the CPU and the device; ``torch.manual_seed`` also asks every backend that is not there."""
        torch.default_generator.manual_seed(SEED)
        if self.device.type != "cpu":
            torch.get_device_module(self.device.type).manual_seed_all(SEED)

    def _gradients(self, result: Any, arguments: Any, sample: Any, *, on_device: bool = False) -> list[Any]:
        """Return the gradients of all operands that want one, for a fixed cotangent of each result."""
        outputs = [t for t in _tensors(sample.output_process_fn_grad(result)) if t.requires_grad]
        wanted = [t for t in _tensors(arguments) if t.requires_grad]
        if not outputs or not wanted:
            return []
        generator = torch.Generator().manual_seed(SEED)
        cotangents = []
        for output in outputs:
            cotangent = torch.randn(output.shape, dtype=output.dtype, generator=generator)
            cotangents.append(self.ready(cotangent.to(output.device)) if on_device else cotangent)
        with self.around_backward(outputs) if on_device else contextlib.nullcontext():
            return list(torch.autograd.grad(outputs, wanted, cotangents, allow_unused=True))

    def _compare(self, actual: Any, expected: Any, what: str, *, values: bool, tolerance: Tolerance | None) -> None:
        fetched = walk(actual, lambda v: self.fetch(v) if isinstance(v, torch.Tensor) else v)
        plain = walk(expected, lambda v: v.detach() if isinstance(v, torch.Tensor) else v)
        compare(fetched, plain, what=what, values=values, tolerance=tolerance)

    def _check_device(self, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            if tensor.device.type != self.device.type:
                raise WrongValue(f"result on {tensor.device}, operands on {self.device}")

    @functools.cached_property
    def _same_numbers(self) -> bool:
        numbers = []
        for device in (torch.device("cpu"), self.device):
            self._seed()
            numbers.append((torch.rand(32, device=device).cpu(), torch.randn(32, device=device).cpu()))
        return all(torch.equal(a, b) for a, b in zip(*numbers, strict=True))

    def _draws_like_cpu(self) -> bool:
        """Say whether the device's generator gives the CPU's numbers for the same seed; asked in the child."""
        return self._same_numbers


class Backward(AgainstCpu):
    """Compares gradients as well."""

    name = "backward"
    requires_grad = True

    def applies(self, op: Any) -> bool:
        """Concern the operators that have a float32 backward."""
        return op.supports_autograd and torch.float32 in op.supported_backward_dtypes("cpu")


MODES: dict[str, type[Mode]] = {"forward": AgainstCpu, "backward": Backward}
# Named, not imported: they need the package's tensors, these do not.
_MANAGED = f"{__package__}.managed"
MANAGED_MODES = {
    "managed": f"{_MANAGED}:Managed",
    "spilled": f"{_MANAGED}:Spilled",
    "spilled-backward": f"{_MANAGED}:SpilledBackward",
    "first-tries": f"{_MANAGED}:FirstTriesFail",
    "partly-managed": f"{_MANAGED}:PartlyManaged",
    "split": f"{_MANAGED}:Split",
}


def find_mode(name: str) -> Mode:
    """Return a new mode by its name in ``MODES``, or by ``package.module:Class``."""
    if name in MODES:
        return MODES[name]()
    if name in MANAGED_MODES:
        name = MANAGED_MODES[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ValueError(f"no mode {name!r}; expected one of {', '.join(MODES)} or 'package.module:Class'")
    made: Mode = getattr(importlib.import_module(module), attribute)()
    return made


def _arguments(sample: Any) -> tuple[Any, Any, Any]:
    return sample.input, sample.args, sample.kwargs


def _call(op: Any, arguments: tuple[Any, Any, Any]) -> Any:
    first, rest, named = arguments
    return op(first, *rest, **named)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [v for v in leaves(value) if isinstance(v, torch.Tensor)]
