"""What every test shares: the kinds of device, and the check that nothing is left behind."""

from __future__ import annotations

import faulthandler
import gc
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from nvml_stub import NvmlStub

from managed_exec import GPUPoolExecutor, sim
from managed_exec.devices import nvml
from managed_exec.memory.manager import MemoryManager, configure
from managed_exec.memory.policy import MemoryPolicy

faulthandler.enable()
# The tests choose the simulator themselves, and differently from one to the next.
os.environ.pop("MANAGED_EXEC_SIM", None)
torch.set_num_threads(1)

SIMULATED_DEVICES = 4
SIMULATED_BYTES = 64 * 2**20


def identity(value: object) -> str:
    """Return what a parameter is called in a test's name: its repr without addresses, the same in every process."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def run_python(code: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run *code* in a process of its own, which may fail; *arguments* are its ``sys.argv[1:]``."""
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, **environment},
    )


@dataclass(frozen=True)
class Kind:
    """A kind of device that a contract is run on."""

    name: str

    @property
    def is_accelerator(self) -> bool:
        return self.name != "cpu"

    @property
    def device_count(self) -> int:
        return torch.accelerator.device_count() if self.is_accelerator else 1

    def pool(self, max_workers: int | None = None, **options: Any) -> GPUPoolExecutor:
        if not self.is_accelerator:
            options.setdefault("devices", "cpu")
        return GPUPoolExecutor(max_workers, **options)


# Looked at once, before any test turns the simulator on: from then on torch means the simulator by "accelerator".
HAS_GPU = torch.accelerator.is_available()


@pytest.fixture(params=["cpu", "sim"])
def kind(request: pytest.FixtureRequest) -> Iterator[Kind]:
    """Each kind of device in turn. ``tests/gpu`` runs what uses this on a real one."""
    yield from make_kind(request.param)


@pytest.fixture
def accelerator() -> Iterator[Kind]:
    """An accelerator: the simulator here, a real one in ``tests/gpu``."""
    yield from make_kind("sim")


@pytest.fixture
def simulator() -> Iterator[Kind]:
    """Four simulated devices of 64 MiB."""
    yield from make_kind("sim")


@pytest.fixture
def small_device(simulator: Kind) -> MemoryManager:
    """The manager of one simulated device of 2 MiB; tensors are managed from 1 KiB on."""
    sim.enable(devices=1, memory="2MiB")
    return configure(MemoryPolicy(min_bytes=1024, wait_s=5))


@pytest.fixture(scope="session", autouse=True)
def autograd_knows_the_simulator() -> None:
    """Autograd asks once, at a process's first backward pass, which kinds of device there are."""
    if not HAS_GPU:
        for _ in make_kind("sim"):
            torch.ones((), device="sim:0", requires_grad=True).backward()


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> NvmlStub:
    """A stub of NVIDIA's management library, for processes that a test starts."""
    return NvmlStub(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def nvml_stub(nvml_library: NvmlStub, monkeypatch: pytest.MonkeyPatch) -> Iterator[NvmlStub]:
    """The same for this process, which reads it through the real ``pynvml``: a machine without cards so far."""
    nvml.reset()
    nvml_library.describe()
    nvml_library.load(monkeypatch)
    yield nvml_library
    nvml.reset()


def make_kind(name: str) -> Iterator[Kind]:
    if name == "sim":
        if HAS_GPU:
            pytest.skip("the simulator would hide the real accelerator from later tests; set CUDA_VISIBLE_DEVICES=''")
        sim.enable(devices=SIMULATED_DEVICES, memory=SIMULATED_BYTES)
    yield Kind(name)
    if name == "sim":
        eventually(lambda: allocated_bytes() == 0)
        sim.disable()


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check that the test leaves no thread and no device byte behind."""
    threads = set(threading.enumerate())
    held = allocated_bytes()
    yield
    assert eventually(lambda: not left_threads(threads)), f"threads left: {left_threads(threads)}"
    assert eventually(lambda: allocated_bytes() <= held), f"device bytes left: {allocated_bytes()}, before: {held}"


def left_threads(before: set[threading.Thread]) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread not in before]


def allocated_bytes() -> int:
    """Bytes that tensors hold on all accelerator devices."""
    if not torch.accelerator.is_available():
        return 0
    return sum(torch.accelerator.memory_allocated(i) for i in range(torch.accelerator.device_count()))


def eventually(condition: Callable[[], object], timeout_s: float = 10.0) -> bool:
    """Poll *condition* until it holds, collecting cycles once; return whether it came to hold."""
    deadline = time.monotonic() + timeout_s
    collected = False
    while not condition():
        if time.monotonic() > deadline:
            return False
        if not collected:
            gc.collect()
            collected = True
        time.sleep(0.005)
    return True
