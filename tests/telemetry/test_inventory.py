"""Which devices would be used, and what is said of the rest, on machines that are described."""

from __future__ import annotations

import json
import types
from collections.abc import Callable

import pytest
import torch
from conftest import SIMULATED_BYTES, SIMULATED_DEVICES
from nvml_stub import NvmlStub

from managed_exec.devices import AcceleratorDevice, CpuDevice, Device, DeviceMemory
from managed_exec.telemetry import inventory as inventory_module
from managed_exec.telemetry.inventory import inventory

CARDS = ("card GPU-aaaa1111 1000 100 25", "card GPU-bbbb2222 2000 200 0")
MIG_CARDS = (
    CARDS[0],
    "card GPU-bbbb2222 2000 200 0 mig",
    "instance MIG-dddd4444 1 0 400 350",
    "instance MIG-eeee5555 2 0 400 350",
    "card GPU-cccc3333 3000 300 0 mig",
)
NO_CUDA = "this torch, 2.99.0+cpu, is built without CUDA; install one that is, see https://pytorch.org"


class Cuda:
    """What CUDA is said to show."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        # Whatever this machine has.
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(inventory_module.sim, "is_enabled", lambda: False)
        monkeypatch.setattr(torch, "__version__", "2.99.0+cpu")
        monkeypatch.setattr(torch.version, "cuda", None)
        self._devices(CpuDevice())

    def built_in(self, problem: str) -> None:
        """This torch is built with CUDA, which cannot be used."""

        def refuse() -> int:
            raise RuntimeError(problem)

        self._monkeypatch.setattr(torch.version, "cuda", "13.0")
        self._monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        self._monkeypatch.setattr(torch.cuda, "current_device", refuse)

    def show(self, *uuids: str, visible: str | None = None) -> None:
        """CUDA shows these, under this CUDA_VISIBLE_DEVICES."""
        if visible is not None:
            self._monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        self.built_in("")
        replace = self._monkeypatch.setattr
        replace(torch.cuda, "current_device", lambda: 0)
        replace(torch.cuda, "is_available", lambda: True)
        replace(torch.cuda, "device_count", lambda: len(uuids))
        replace(torch.cuda, "get_device_properties", lambda index: types.SimpleNamespace(uuid=uuids[index][4:]))
        replace(torch.cuda, "get_device_name", lambda index: f"Card {index}")
        replace(AcceleratorDevice, "memory", lambda device: DeviceMemory(7, 10 + device.torch_device.index, 0))
        self._devices(*(AcceleratorDevice(torch.device("cuda", i)) for i in range(len(uuids))))

    def _devices(self, *devices: Device) -> None:
        self._monkeypatch.setattr(inventory_module, "resolve_devices", lambda: devices)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return Cuda(monkeypatch)


@pytest.fixture
def rest(nvml_stub: NvmlStub) -> Callable[..., list[tuple[str, str | None]]]:
    """What is not used, and why, of the machine with these lines."""

    def not_used(*lines: str) -> list[tuple[str, str | None]]:
        nvml_stub.describe(*lines)
        return [(item.device, item.reason) for item in inventory().not_used]

    return not_used


Rest = Callable[..., list[tuple[str, str | None]]]
CPU = ("cpu", "used where there is no accelerator, and for devices='cpu'")


class TestUsed:
    def test_cuda(self, nvml_stub: NvmlStub, cuda: Cuda) -> None:
        nvml_stub.describe(*CARDS)
        cuda.show("GPU-bbbb2222", "GPU-aaaa1111", visible="1,0")
        seen = inventory()
        assert [(item.device, item.name, item.uuid, item.free_bytes, item.total_bytes) for item in seen.used] == [
            ("cuda:0", "Card 0", "GPU-bbbb2222", 7, 10),
            ("cuda:1", "Card 1", "GPU-aaaa1111", 7, 11),
        ]
        assert [(item.device, item.reason) for item in seen.not_used] == [CPU]
        assert "  cuda:1  Card 1  GPU-aaaa1111  7 B of 11 B free" in str(seen).splitlines()

    def test_memory_that_cannot_be_read(self, nvml_stub: NvmlStub, cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(device: AcceleratorDevice) -> DeviceMemory:
            raise torch.AcceleratorError("CUDA error: uncorrectable ECC error\nmore")

        nvml_stub.describe(*CARDS)
        cuda.show("GPU-aaaa1111", "GPU-bbbb2222")
        monkeypatch.setattr(AcceleratorDevice, "memory", broken)
        for item in inventory().used:
            assert (item.free_bytes, item.total_bytes) == (None, None)
            assert item.reason == "its memory cannot be read: CUDA error: uncorrectable ECC error"

    def test_cpu(self, cuda: Cuda, rest: Rest) -> None:
        rest()
        (item,) = inventory().used
        assert item.device == "cpu"
        assert 0 < int(item.free_bytes or 0) <= int(item.total_bytes or 0)

    @pytest.mark.usefixtures("simulator")
    def test_simulated(self, nvml_stub: NvmlStub) -> None:
        nvml_stub.describe(*CARDS)
        seen = inventory()
        assert [(item.device, item.total_bytes) for item in seen.used] == [
            (f"sim:{i}", SIMULATED_BYTES) for i in range(SIMULATED_DEVICES)
        ]
        hidden = "the simulated accelerator is enabled, and hides real ones from the process"
        assert [item.reason for item in seen.not_used] == [hidden, hidden, CPU[1]]


class TestWhyNot:
    def test_hidden(self, cuda: Cuda, rest: Rest) -> None:
        cuda.show("GPU-bbbb2222", visible="1,-1,0")
        assert rest(*CARDS) == [
            ("NVIDIA 0", "hidden by CUDA_VISIBLE_DEVICES='1,-1,0'; its entry '-1' names no device and ends the list"),
            CPU,
        ]
        assert inventory().not_used[0].free_bytes == 100, "its memory is known all the same"

    def test_what_cuda_uses_is_used_whatever_was_foretold(self, cuda: Cuda, rest: Rest) -> None:
        """CUDA numbers the fastest first, so that its 0 can be NVML's 1."""
        cuda.show("GPU-bbbb2222", visible="0")
        assert rest(*CARDS) == [("NVIDIA 0", "CUDA does not show it to this process"), CPU]

    def test_hidden_altogether(self, cuda: Cuda, rest: Rest, monkeypatch: pytest.MonkeyPatch) -> None:
        cuda.built_in("No CUDA GPUs are available")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        assert rest(*CARDS) == [(f"NVIDIA {i}", "hidden by CUDA_VISIBLE_DEVICES=''") for i in range(2)]

    def test_instances(self, cuda: Cuda, rest: Rest) -> None:
        cuda.show("MIG-dddd4444", visible="1,0")
        assert rest(*MIG_CARDS) == [
            ("NVIDIA 0", "CUDA shows a process one MIG instance, and nothing beside it"),
            ("NVIDIA 1 MIG 2/0", "hidden by CUDA_VISIBLE_DEVICES='1,0'"),
            ("NVIDIA 2", "in MIG mode, but has no instance: create one"),
            CPU,
        ]

    def test_lost(self, cuda: Cuda, rest: Rest) -> None:
        cuda.show("GPU-aaaa1111")
        reason = "GPU is lost: it no longer answers on its bus; reset it or reboot"
        assert rest(*CARDS, "fail * GPU-bbbb2222 15") == [("NVIDIA 1", reason), CPU]

    def test_torch_without_cuda(self, cuda: Cuda, rest: Rest) -> None:
        assert rest(*CARDS) == [("NVIDIA 0", NO_CUDA), ("NVIDIA 1", NO_CUDA)]

    def test_driver_too_old_for_torch(self, cuda: Cuda, rest: Rest) -> None:
        cuda.built_in("The NVIDIA driver on your system is too old (found version 12020).\nPlease update")
        reason = "CUDA cannot be used: The NVIDIA driver on your system is too old (found version 12020)."
        assert rest(*CARDS) == [("NVIDIA 0", reason), ("NVIDIA 1", reason)]

    def test_no_driver(self, cuda: Cuda, rest: Rest, monkeypatch: pytest.MonkeyPatch) -> None:
        cuda.built_in("Found no NVIDIA driver on your system.")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
        reason = "load the NVIDIA driver (nvidia-smi does), if there is an NVIDIA device"
        assert rest("init 9") == [
            ("NVIDIA", f"cards cannot be listed: Driver Not Loaded: {reason}"),
            ("CUDA", "CUDA cannot be used: Found no NVIDIA driver on your system.; CUDA_VISIBLE_DEVICES='3'"),
        ]

    def test_nvml_missing_where_cuda_works(self, cuda: Cuda, rest: Rest) -> None:
        cuda.show("GPU-aaaa1111")
        assert [device for device, _ in rest("init 18")] == ["NVIDIA", "cpu"]


def test_json(cuda: Cuda, rest: Rest) -> None:
    cuda.show("GPU-aaaa1111", visible="0")
    rest(*CARDS)
    seen = json.loads(json.dumps(inventory().as_json()))
    assert seen["used"] == [
        {
            "device": "cuda:0",
            "name": "Card 0",
            "uuid": "GPU-aaaa1111",
            "free_bytes": 7,
            "total_bytes": 10,
            "reason": None,
        }
    ]
    assert [item["device"] for item in seen["not_used"]] == ["NVIDIA 1", "cpu"]
