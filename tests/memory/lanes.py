"""Threads that work on managed tensors and on their models.

A *lane* is a thread with cells (see ``cells``) and streams of its own, which runs commands on them: each is done on the
plain tensors first, then on the managed ones, and must end in the same way, an error included.
"""

from __future__ import annotations

import faulthandler
import queue
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from cells import Call, Cell, Outcome, Storage, tensors_in

from managed_exec.errors import NotMovableError, TierFullError
from managed_exec.memory.manager import manager
from managed_exec.tensors.managed import manage

WAIT_S = 30
MOST_CELLS = 16  # of a lane; the oldest goes when there are more
MOST_ELEMENTS = 512  # of a result, so that the operands of every kernel fit beside what cannot move
MOST_UNMOVABLE_BYTES = 8 * 1024  # of a lane on accelerators: pinned and exported storages


@dataclass
class Lane:
    """A thread, its streams, and its cells."""

    number: int
    shared: list[Cell]  # of all lanes; read, moved, never written
    streams: list[torch.Stream]
    cells: list[Cell] = field(default_factory=list)
    storages: dict[int, Storage] = field(default_factory=dict)
    touched: list[Cell] = field(default_factory=list)  # since the last check
    log: list[str] = field(default_factory=list)  # the commands since then

    def __post_init__(self) -> None:
        self._shared_keys = {cell.key for cell in self.shared}
        self._several_devices = False  # whether a graph of this lane has operations on more than one
        self._commands: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[str] = queue.SimpleQueue()  # the text of an error; an error would hold tensors
        self._thread = threading.Thread(target=self._work, name=f"lane {self.number}", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        for stream in self.streams:
            torch.accelerator.set_stream(stream)
        while (command := self._commands.get()) is not None:
            try:
                command()
            except BaseException:
                self._results.put(traceback.format_exc())
            else:
                self._results.put("")
            del command

    def start(self, command: Call) -> None:
        self._commands.put(command)

    def join(self) -> str:
        """Wait for the command that was started; return what went wrong in it, or nothing."""
        try:
            text = self._results.get(timeout=WAIT_S)
        except queue.Empty:
            faulthandler.dump_traceback()
            text = "it hangs"
        return text and f"lane {self.number}, after {', '.join(self.log)}: {text}"

    def stop(self) -> None:
        self._commands.put(None)
        self._thread.join(WAIT_S)

    # -- cells ------------------------------------------------------------------------------------------------------

    def pick(self, number: int, *, readable: bool = False) -> Cell | None:
        """Return one of the cells; of the shared ones too if it is only read."""
        cells = self.cells + (self.shared if readable else [])
        return cells[number % len(cells)] if cells else None

    def like(self, cell: Cell, number: int) -> Cell:
        """Return a readable cell of the same shape."""
        found = [other for other in self.cells + self.shared if other.model.shape == cell.model.shape]
        return found[number % len(found)]

    def name(self, cell: Cell) -> str:
        """Name a cell in the log."""
        where = f"shared {self.shared.index(cell)}" if cell in self.shared else f"cell {self.cells.index(cell)}"
        return f"{where}: {cell.device} {cell.model.dtype} {tuple(cell.model.shape)}"

    def storage(self, cell: Cell) -> Storage:
        return self.storages.setdefault(cell.key, Storage(shared=cell.key in self._shared_keys))

    def is_shared(self, cell: Cell) -> bool:
        return self.storage(cell).shared

    def add(self, cell: Cell) -> None:
        self.cells.append(cell)
        self.touched.append(cell)
        if cell.model.requires_grad:
            self.storage(cell).in_graph = True
        if len(self.cells) > MOST_CELLS:
            self.drop(self.cells[0])

    def drop(self, cell: Cell) -> None:
        self.cells.remove(cell)
        self.touched = [other for other in self.touched if other is not cell]
        kept = {other.key for other in self.cells}
        self.storages = {key: storage for key, storage in self.storages.items() if key in kept}

    def check_touched(self) -> None:
        for cell in self.touched:
            cell.check()
        self.check_aliases()
        self.touched, self.log = [], []

    def check_all(self) -> None:
        for cell in self.cells + self.shared:
            cell.check()
        self.check_aliases()

    def check_aliases(self) -> None:
        """Check that two managed tensors share a storage just where their models do."""
        known = [cell for cell in self.cells if cell.managed.is_registered]
        by_model: dict[int, Any] = {}
        for cell in known:
            assert by_model.setdefault(cell.key, cell.managed._record) is cell.managed._record
        assert len(set(map(id, by_model.values()))) == len(by_model)

    # -- commands ---------------------------------------------------------------------------------------------------

    def make(self, model: torch.Tensor, device: str, requires_grad: bool) -> None:
        managed = manage(model.clone()).to(device)
        if requires_grad and model.dtype.is_floating_point:
            managed.requires_grad_()
            model.requires_grad_()
        self.add(Cell(managed, model))

    def call(self, func: Call, cells: Sequence[Cell], *, writes: bool = False) -> None:
        """Call *func* on the models and on the managed tensors of *cells*; what it returns become new cells."""
        if len({cell.device for cell in cells if cell.managed.pinned}) > 1:
            return  # refused, or not, depending on the operation
        expected = Outcome.of(func, *(cell.model for cell in cells))
        if not writes and any(tensor.numel() > MOST_ELEMENTS for tensor in tensors_in(expected.value)):
            return
        actual = Outcome.of(func, *(cell.managed for cell in cells))
        if expected.error is not None or actual.error is not None:
            assert expected.error is not None, f"only the managed call raised {actual.error}: {actual.text}"
            assert actual.error is not None, (
                f"only the plain call raised {expected.error}: {expected.text}; grad mode {torch.is_grad_enabled()}, "
                + ", ".join(f"{t.device} {t.requires_grad} {t.is_leaf}" for c in cells for t in (c.managed, c.model))
            )
            assert issubclass(actual.error, expected.error), (expected, actual)
            return
        models, results = tensors_in(expected.value), tensors_in(actual.value)
        assert len(models) == len(results)
        if any(tensor.requires_grad for tensor in models):
            self._several_devices |= len({cell.device for cell in cells}) > 1
            for cell in cells:
                self.storage(cell).in_graph = True
        if writes:
            assert all(result.device == cells[0].device for result in results)
            self.touched += [cell for cell in cells if cell not in self.touched and cell in self.cells]
            return
        for model, result in zip(models, results, strict=True):
            cell = Cell(result, model)
            assert cell.device in {operand.device for operand in cells}
            assert cell.version_gap == 0
            cell.check_form()
            self.add(cell)

    def write(self, func: Call, target: Cell, *others: Cell) -> None:
        """Call *func*, which writes to *target* in place."""
        in_own_graph = target.model.requires_grad and any(other.key == target.key for other in others)
        if not self.is_shared(target) and not in_own_graph:  # which torch never frees, plain tensors neither
            self.call(func, [target, *others], writes=True)

    def resize(self, cell: Cell, shape: tuple[int, ...]) -> None:
        """Resize the storage, which nobody else may look at."""
        alone = [other.key for other in self.cells].count(cell.key) == 1
        storage = self.storage(cell)
        if alone and not (storage.shared or storage.in_graph or storage.exported):
            self.call(lambda t: t.resize_(shape).fill_(1), [cell], writes=True)

    def give_storage(self, func: Call, target: Cell, source: Cell) -> None:
        """Give *target* the storage of *source* by *func*."""
        same = target.device == source.device and target.model.dtype == source.model.dtype
        # For devices that are not its own torch takes lazy bits for another kind of tensor, and refuses.
        bits = [(t.is_conj(), t.is_neg()) for t in (target.model, source.model)]
        same = same and (target.device.type == "cpu" or bits[0] == bits[1])
        if same and not target.model.requires_grad and not source.model.requires_grad and target.array is None:
            self.call(func, [target, source], writes=True)
            target.version_gap = target.managed._version - target.model._version

    def to(self, cell: Cell, device: str, non_blocking: bool) -> None:
        target = torch.device(device)
        non_blocking = non_blocking and target.type != "cpu"  # a copy to the host must be waited for
        managed = cell.managed.to(target, non_blocking=non_blocking)
        if target == cell.device:
            assert managed is cell.managed
            return
        model = cell.model.clone()
        if not managed.is_conj():
            model = model.resolve_conj()
        if not managed.is_neg():
            model = model.resolve_neg()
        if model.requires_grad:
            self._several_devices = True
            self.storage(cell).in_graph = True
        self.add(Cell(managed, model))

    def copy_between(self, target: Cell, source: Cell, non_blocking: bool) -> None:
        """Copy in place, from any device to any."""
        non_blocking = non_blocking and target.device.type != "cpu"
        self.write(lambda a, b: a.copy_(b, non_blocking=non_blocking), target, source)

    def spill(self, cell: Cell, tier: str | None) -> None:
        before = cell.managed.residency
        outcome = Outcome.of(cell.managed.spill, tier)
        if outcome.error is TierFullError:
            assert tier in ("host", "peer"), outcome.text
            assert "no tier has room" in outcome.text
            return
        if self.is_shared(cell):
            assert outcome.error in (None, NotMovableError), outcome.text  # another lane may be using it
            return
        on_host = cell.device.type == "cpu" and tier in ("host", None)
        obstacle = self.obstacle(cell)
        if before == "device" and obstacle and (not on_host or obstacle == "too small"):
            assert outcome.error is NotMovableError, f"expected {obstacle}, got {outcome}"
            assert cell.managed.residency == "device"
        else:
            assert outcome.error is None, f"{outcome.error}: {outcome.text}"
            wanted = ("device", "disk") if on_host else ("peer", "host", "disk") if tier is None else (tier,)
            assert cell.managed.residency in wanted, f"{cell.managed.residency}, spilled to {tier} from {before}"

    def obstacle(self, cell: Cell) -> str | None:
        """Return why the model says that the cell cannot be spilled."""
        n_bytes = cell.model.untyped_storage().nbytes()
        storage = self.storage(cell)
        if n_bytes == 0 or n_bytes < manager().policy.min_bytes:
            return "too small"
        if storage.exported or storage.pins:
            return "exported" if storage.exported else "pinned"
        return None

    def unspill(self, cell: Cell) -> None:
        assert cell.managed.unspill() is cell.managed
        if self.obstacle(cell):
            assert cell.managed.residency == "device"

    def may_fix(self, cell: Cell) -> bool:
        """Return whether *cell* may be made one more storage of this lane that cannot move."""
        if self.is_shared(cell):
            return False
        fixed = {other.key: other for other in [*self.cells, cell]}
        n_bytes = sum(
            other.model.untyped_storage().nbytes()
            for key, other in fixed.items()
            if other.device.type != "cpu" and (other is cell or key == cell.key or self.obstacle(other))
        )
        return n_bytes <= MOST_UNMOVABLE_BYTES

    def pin(self, cell: Cell) -> None:
        if self.may_fix(cell):
            cell.managed.pin()
            self.storage(cell).pins += 1
            assert cell.managed.residency == "device"

    def unpin(self, cell: Cell) -> None:
        if self.is_shared(cell):
            return
        outcome = Outcome.of(cell.managed.unpin)
        storage = self.storage(cell)
        small = not cell.managed.is_registered  # there is nothing to count pins in
        assert (outcome.error is ValueError) == (storage.pins == 0 and not small), outcome
        storage.pins = max(0, storage.pins - 1)

    def hold(self, cell: Cell) -> None:
        """Write through the plain tensor that ``hold`` gives."""
        if cell.model.requires_grad or self.storage(cell).in_graph or not self.may_fix(cell):
            return
        expected = Outcome.of(cell.model.detach().mul_, 2)
        with cell.managed.hold() as plain:
            assert type(plain) is torch.Tensor
            actual = Outcome.of(plain.mul_, 2)
            assert actual.error is expected.error
            del plain, actual
        self.touched.append(cell)

    def export(self, cell: Cell) -> None:
        """Have a pointer given out: the storage never moves again."""
        if self.may_fix(cell):
            assert cell.managed.data_ptr() or cell.model.numel() == 0
            self.storage(cell).exported = cell.managed.is_registered
            assert cell.managed.residency == "device"

    def numpy(self, cell: Cell) -> None:
        if cell.device.type != "cpu":
            expected = Outcome.of(lambda: cell.model.clone().numpy(force=True).tobytes())
            actual = Outcome.of(lambda: cell.managed.numpy(force=True).tobytes())
            assert (expected.value, expected.error) == (actual.value, actual.error)
            return
        if self.is_shared(cell):
            return
        expected, actual = Outcome.of(cell.model.numpy), Outcome.of(cell.managed.numpy)
        assert expected.error is actual.error, (expected, actual)
        if expected.error is None:
            cell.array, cell.model_array = actual.value, expected.value
            self.storage(cell).exported = True
            assert cell.array.tobytes() == cell.model_array.tobytes()

    def write_array(self, cell: Cell) -> None:
        """Write through an array, and let it go."""
        if cell.array is not None:
            if not self.storage(cell).in_graph and cell.array.flags.writeable:
                cell.array[...] *= 2
                cell.model_array[...] *= 2
            cell.array = cell.model_array = None
            self.touched.append(cell)

    def backward(self, cell: Cell, retain_graph: bool) -> None:
        if not cell.model.requires_grad:
            return

        def run(tensor: torch.Tensor) -> None:
            tensor.sum().backward(retain_graph=retain_graph)

        # On several devices the engine's threads would add gradients up in any order.
        with torch.autograd.set_multithreading_enabled(not self._several_devices):
            expected = Outcome.of(run, cell.model)
            actual = Outcome.of(run, cell.managed)
        assert (actual.error is None) == (expected.error is None), (expected, actual)
        assert actual.error is None or issubclass(actual.error, expected.error), (expected, actual)
        self.touched = list(self.cells)  # any of them may be a leaf
