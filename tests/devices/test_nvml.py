"""Readings by UUID, against a management library that these tests write themselves."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Iterator

import pytest
import torch

from managed_exec.devices import nvml

UUIDS = ["GPU-aaaa1111", "GPU-aabb2222", "GPU-cccc3333"]
INSTANCE = "MIG-dddd4444"


class FakeNvml(types.ModuleType):
    """A ``pynvml`` of three cards and one MIG instance, whose calls can be made to fail."""

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.failing: set[str] = set()
        self.initialised = 0
        self.as_bytes = False

    def _check(self, function: str) -> None:
        if function in self.failing:
            raise self.NVMLError(f"{function} failed")

    def nvmlInit(self) -> None:
        self._check("nvmlInit")
        self.initialised += 1

    def nvmlDeviceGetCount(self) -> int:
        self._check("nvmlDeviceGetCount")
        return len(UUIDS)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        self._check("nvmlDeviceGetHandleByIndex")
        return UUIDS[index]

    def nvmlDeviceGetUUID(self, handle: str) -> str | bytes:
        self._check("nvmlDeviceGetUUID")
        return handle.encode() if self.as_bytes else handle

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self._check("nvmlDeviceGetHandleByUUID")
        if uuid not in [*UUIDS, INSTANCE]:
            raise self.NVMLError("not found")
        return uuid

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> types.SimpleNamespace:
        self._check("nvmlDeviceGetMemoryInfo")
        free = 50 if handle == INSTANCE else 100 * (UUIDS.index(handle) + 1)
        return types.SimpleNamespace(total=1000, used=900 - free, free=free)

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> types.SimpleNamespace:
        self._check("nvmlDeviceGetUtilizationRates")
        return types.SimpleNamespace(gpu=25, memory=99)


@pytest.fixture(autouse=True)
def fresh_session() -> Iterator[None]:
    nvml.session.cache_clear()
    yield
    nvml.session.cache_clear()


@pytest.fixture
def pynvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


@pytest.mark.usefixtures("pynvml")
class TestVisible:
    @pytest.mark.parametrize(
        ("value", "cards"),
        [
            (None, [0, 1, 2]),
            ("0", [0]),
            ("2,0", [2, 0]),
            ("0,1,2", [0, 1, 2]),
            (" 2 , 1 ", [2, 1]),
            ("GPU-aaaa1111", [0]),
            ("GPU-cccc3333,GPU-aaaa1111", [2, 0]),
            ("GPU-c,GPU-aab", [2, 1]),
            ("GPU-c,0", [2, 0]),
            # No device at all.
            ("", []),
            (" ", []),
            ("-1", []),
            ("NoDevFiles", []),
            ("none", []),
            # A prefix of two cards, of none, and names without their GPU- are invalid.
            ("GPU-aa", []),
            ("GPU-", []),
            ("GPU-ffff", []),
            ("aaaa1111", []),
            ("gpu-cccc3333", []),
            # Cut off at the first that is invalid.
            ("1,-1,2", [1]),
            ("0,3,1", [0]),
            ("2,,0", [2]),
            ("0,", [0]),
            ("1,GPU-aa,2", [1]),
            ("0,one,2", [0]),
            # A card named twice leaves none, whatever it is called.
            ("1,1", []),
            ("0,1,0", []),
            ("0,GPU-aaaa", []),
            ("1,1,9", []),
            # But not one named again behind the cut.
            ("1,9,1", [1]),
        ],
    )
    def test_cards(self, value: str | None, cards: list[int]) -> None:
        assert nvml.visible_uuids(value) == [UUIDS[card] for card in cards]

    @pytest.mark.parametrize("name", [INSTANCE, "MIG-GPU-aaaa1111/1/0"])
    def test_instance(self, name: str) -> None:
        assert nvml.visible_uuids(name) == [name]
        assert nvml.visible_uuids(f"{name},0") == [name, UUIDS[0]]

    def test_names_as_bytes(self, pynvml: FakeNvml) -> None:
        """Versions of pynvml before 11.5 return them so."""
        pynvml.as_bytes = True
        assert nvml.visible_uuids("GPU-cc") == [UUIDS[2]]

    @pytest.mark.parametrize("function", ["nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetUUID"])
    def test_cards_that_cannot_be_listed(self, pynvml: FakeNvml, function: str) -> None:
        pynvml.failing.add(function)
        assert nvml.visible_uuids(None) == []
        assert nvml.visible_uuids("0") == []


class TestCudaUuid:
    @pytest.fixture
    def no_cuda(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    @pytest.mark.usefixtures("pynvml", "no_cuda")
    def test_by_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
        assert [nvml.cuda_uuid(i) for i in range(3)] == [UUIDS[2], UUIDS[0], None]
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
        assert [nvml.cuda_uuid(i) for i in range(4)] == [*UUIDS, None]

    @pytest.mark.parametrize(
        ("uuid", "name"), [("cccc3333", "GPU-cccc3333"), ("GPU-cccc3333", "GPU-cccc3333"), (INSTANCE, INSTANCE)]
    )
    def test_cuda_knows_best(self, monkeypatch: pytest.MonkeyPatch, uuid: str, name: str) -> None:
        """CUDA's own answer counts, for the environment says nothing of CUDA_DEVICE_ORDER."""
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: types.SimpleNamespace(uuid=uuid))
        assert nvml.cuda_uuid(0) == name


class TestReadings:
    def test_memory(self, pynvml: FakeNvml) -> None:
        assert [nvml.memory(uuid) for uuid in UUIDS] == [(100, 1000), (200, 1000), (300, 1000)]
        assert nvml.memory(INSTANCE) == nvml.NvmlMemory(free_bytes=50, total_bytes=1000)

    def test_utilization(self, pynvml: FakeNvml) -> None:
        assert nvml.utilization(UUIDS[0]) == 0.25

    def test_one_query_failing_leaves_the_other(self, pynvml: FakeNvml) -> None:
        pynvml.failing.add("nvmlDeviceGetUtilizationRates")  # MIG instances cannot tell
        assert nvml.utilization(INSTANCE) is None
        assert nvml.memory(INSTANCE) == (50, 1000)

    @pytest.mark.parametrize("function", ["nvmlDeviceGetHandleByUUID", "nvmlDeviceGetMemoryInfo"])
    def test_failing(self, pynvml: FakeNvml, function: str) -> None:
        pynvml.failing.add(function)
        assert nvml.memory(UUIDS[0]) is None
        pynvml.failing.clear()
        assert nvml.memory(UUIDS[0]) == (100, 1000), "the next reading is tried again"

    def test_unknown_card(self, pynvml: FakeNvml) -> None:
        assert nvml.memory("GPU-ffff") is None
        assert nvml.utilization("GPU-ffff") is None


class TestSession:
    def test_opened_on_first_use_and_once(self, pynvml: FakeNvml) -> None:
        assert pynvml.initialised == 0
        for _ in range(3):
            nvml.memory(UUIDS[0])
            nvml.visible_uuids(None)
        assert nvml.session() is pynvml
        assert pynvml.initialised == 1

    def test_from_several_threads_at_once(self, pynvml: FakeNvml) -> None:
        """Opening it twice is allowed, for NVML counts; a thread without an answer is not."""
        together, readings = threading.Barrier(8), []

        def read() -> None:
            together.wait(30)
            readings.append(nvml.memory(UUIDS[1]))

        threads = [threading.Thread(target=read) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert readings == [(200, 1000)] * 8

    def test_forgotten_on_request(self, pynvml: FakeNvml) -> None:
        nvml.session()
        nvml.session.cache_clear()
        nvml.session()
        assert pynvml.initialised == 2

    @pytest.mark.parametrize("reason", ["not installed", "no driver"])
    def test_unavailable(
        self, reason: str, pynvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        if reason == "not installed":
            monkeypatch.setitem(sys.modules, "pynvml", None)
        else:
            pynvml.failing.add("nvmlInit")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        with caplog.at_level("INFO"):
            assert nvml.session() is None
            assert nvml.memory(UUIDS[0]) is None
            assert nvml.utilization(UUIDS[0]) is None
            assert nvml.visible_uuids(None) == nvml.visible_uuids("0") == []
            assert nvml.cuda_uuid(0) is None
        assert [record.message[:18] for record in caplog.records] == ["no NVML readings: "], "said once"
