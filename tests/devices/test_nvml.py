"""Readings by UUID, through the real ``pynvml``, of cards that a stub of the management library describes."""

from __future__ import annotations

import ctypes
import logging
import sys
import threading
import types
from collections.abc import Callable

import pynvml
import pytest
import torch
from conftest import run_python
from nvml_stub import NvmlStub

from managed_exec.devices import nvml
from managed_exec.devices.nvml import NvmlError, NvmlMemory, Process
from managed_exec.devices.visibility import Card, Instance

UUIDS = ["GPU-aaaa1111", "GPU-aabb2222", "GPU-cccc3333"]
CARDS = (
    "card GPU-aaaa1111 1000 100 25",
    "process 41 600 python train.py",
    "process 42 - /usr/bin/python3",
    "card GPU-aabb2222 1000 200 0",
    "card GPU-cccc3333 1000 300 100",
)
MIG_CARDS = (
    "card GPU-aaaa1111 1000 100 25",
    "card GPU-aabb2222 1000 200 0 mig",
    "instance MIG-dddd4444 1 0 400 350",
    "process 43 50 worker",
    "instance - 0 0 0 0",
    "instance MIG-eeee6666 5 2 500 450",
)
INSTANCES = (Instance("MIG-dddd4444", 1, 0), Instance("MIG-eeee6666", 5, 2))
LOST = "GPU is lost: it no longer answers on its bus; reset it or reboot"


@pytest.fixture
def machine(nvml_stub: NvmlStub) -> Callable[..., None]:
    """Three cards; called with lines it adds them to the description."""

    def describe(*lines: str) -> None:
        nvml_stub.describe(*CARDS, *lines)

    describe()
    return describe


@pytest.fixture
def mig_machine(nvml_stub: NvmlStub) -> Callable[..., None]:
    """Two cards, the second in MIG mode."""

    def describe(*lines: str) -> None:
        nvml_stub.describe(*MIG_CARDS, *lines)

    describe()
    return describe


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


class TestReadings:
    def test_memory(self, machine: Callable[..., None]) -> None:
        assert [nvml.memory(uuid) for uuid in UUIDS] == [(100, 1000), (200, 1000), (300, 1000)]
        assert nvml.memory(UUIDS[0]) == NvmlMemory(free_bytes=100, total_bytes=1000)

    def test_utilization(self, machine: Callable[..., None]) -> None:
        assert [nvml.utilization(uuid) for uuid in UUIDS] == [0.25, 0, 1]

    def test_everything(self, machine: Callable[..., None]) -> None:
        """A process that computes and draws is listed once; the size of one may be unknown."""
        processes = (Process(41, "python train.py", 600), Process(42, "/usr/bin/python3", None))
        assert nvml.reading(UUIDS[0]) == ((100, 1000), 0.25, processes, ())
        assert nvml.reading(UUIDS[1]) == ((200, 1000), 0, (), ())

    def test_memory_of_today_s_cards_fits(self, nvml_stub: NvmlStub) -> None:
        total = 192 * 2**30
        nvml_stub.describe(f"card {UUIDS[0]} {total} {total - 1} 0", f"process 7 {total} big")
        assert nvml.memory(UUIDS[0]) == (total - 1, total)
        assert nvml.reading(UUIDS[0]).processes == (Process(7, "big", total),)

    @pytest.mark.parametrize(
        ("function", "missing"),
        [
            ("nvmlDeviceGetMemoryInfo", "memory"),
            ("nvmlDeviceGetUtilizationRates", "utilization"),
            ("nvmlDeviceGetComputeRunningProcesses", "processes"),
        ],
    )
    def test_permission_denied(self, machine: Callable[..., None], function: str, missing: str) -> None:
        """What may not be read is missing, with the reason; all else is there, and the other cards' too."""
        whole = nvml.reading(UUIDS[0])
        machine(f"fail {function} {UUIDS[0]} 4")
        reason = "Insufficient Permissions: only some users of this machine may read that"
        assert nvml.reading(UUIDS[0]) == whole._replace(**{missing: None}, problems=(f"{missing}: {reason}",))
        assert nvml.reading(UUIDS[1]).problems == ()
        machine()
        assert nvml.reading(UUIDS[0]) == whole, "the next reading is tried again"

    def test_one_query_failing_leaves_the_other(self, machine: Callable[..., None]) -> None:
        machine(f"fail nvmlDeviceGetUtilizationRates {UUIDS[0]} 4", f"fail nvmlDeviceGetMemoryInfo {UUIDS[1]} 4")
        assert (nvml.memory(UUIDS[0]), nvml.utilization(UUIDS[0])) == ((100, 1000), None)
        assert (nvml.memory(UUIDS[1]), nvml.utilization(UUIDS[1])) == (None, 0)

    def test_process_without_a_name(self, machine: Callable[..., None]) -> None:
        machine("fail nvmlSystemGetProcessName * 4")
        assert nvml.reading(UUIDS[0]).processes == (Process(41, None, 600), Process(42, None, None))

    def test_process_whose_name_is_no_text(self, nvml_stub: NvmlStub) -> None:
        nvml_stub.describe(CARDS[0], "process 41 600 caf\xe9")
        assert nvml.reading(UUIDS[0]).processes == (Process(41, None, 600),)

    def test_unknown_card(self, machine: Callable[..., None]) -> None:
        assert nvml.memory("GPU-ffff") is None
        assert nvml.utilization("GPU-ffff") is None
        assert nvml.reading("GPU-ffff") == (None, None, None, ("Not Found",))


class TestLostCard:
    def test_others_go_on(self, machine: Callable[..., None]) -> None:
        """NVML refuses every UUID while a card is lost."""
        before = nvml.reading(UUIDS[0])
        machine(f"fail * {UUIDS[1]} 15")
        with pytest.raises(pynvml.NVMLError):
            pynvml.nvmlDeviceGetHandleByUUID(UUIDS[0])
        assert nvml.reading(UUIDS[1]) == (None, None, None, (LOST,))
        assert nvml.memory(UUIDS[1]) is nvml.utilization(UUIDS[1]) is None
        assert nvml.reading(UUIDS[0]) == before
        assert nvml.memory(UUIDS[2]) == (300, 1000)

    def test_comes_back(self, machine: Callable[..., None]) -> None:
        machine(f"fail * {UUIDS[1]} 15")
        assert nvml.memory(UUIDS[1]) is None
        machine()
        assert nvml.memory(UUIDS[1]) == (200, 1000)

    def test_while_others_read(self, machine: Callable[..., None]) -> None:
        """Whenever the card is lost and comes back, no reading of another is missed."""
        over, whole = threading.Event(), nvml.reading(UUIDS[0])
        readings: list[nvml.Reading] = []

        def read() -> None:
            while not over.is_set():
                readings.append(nvml.reading(UUIDS[0]))

        threads = [threading.Thread(target=read) for _ in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(20):
            machine(f"fail * {UUIDS[1]} 15")
            assert nvml.memory(UUIDS[1]) is None
            machine()
            assert nvml.memory(UUIDS[1]) == (200, 1000)
        over.set()
        for thread in threads:
            thread.join()
        assert readings
        assert set(readings) == {whole}

    def test_lost_between_two_queries(self, machine: Callable[..., None]) -> None:
        """The handle was had before: each query says so, and the reason stands once."""
        queries = ("MemoryInfo", "UtilizationRates", "ComputeRunningProcesses")
        machine(*(f"fail nvmlDeviceGet{query} {UUIDS[1]} 15" for query in queries))
        assert nvml.reading(UUIDS[1]).problems == (f"memory, utilization, processes: {LOST}",)

    def test_list(self, machine: Callable[..., None]) -> None:
        machine(f"fail * {UUIDS[1]} 15")
        assert [(card.number, card.uuid, card.problem) for card in nvml.cards()] == [
            (0, UUIDS[0], None),
            (1, None, LOST),
            (2, UUIDS[2], None),
        ]
        assert nvml.visible_uuids(None) == [UUIDS[0], UUIDS[2]]

    def test_beside_an_instance(self, mig_machine: Callable[..., None]) -> None:
        mig_machine(f"fail * {UUIDS[0]} 15")
        assert nvml.memory("MIG-eeee6666") == (450, 500)


class TestInstances:
    def test_list(self, mig_machine: Callable[..., None]) -> None:
        """The numbers of instances have gaps."""
        assert nvml.cards() == (
            Card(0, UUIDS[0], "Stub GPU-aaaa"),
            Card(1, UUIDS[1], "Stub GPU-aabb", is_mig=True, instances=INSTANCES),
        )

    def test_reading(self, mig_machine: Callable[..., None]) -> None:
        """An instance has memory and processes of its own; how busy it is, NVML does not say."""
        seen = nvml.reading("MIG-dddd4444")
        assert seen == ((350, 400), None, (Process(43, "worker", 50),), ("utilization: Not Supported",))

    @pytest.mark.parametrize("value", ["MIG-eeee6666", "MIG-e", "MIG-GPU-aabb2222/5/2", "MIG-e,0"])
    def test_visible(self, mig_machine: Callable[..., None], value: str) -> None:
        assert nvml.visible_uuids(value) == ["MIG-eeee6666"]

    @pytest.mark.parametrize("function", ["MigMode", "MaxMigDeviceCount", "MigDeviceHandleByIndex"])
    def test_that_cannot_be_listed(self, mig_machine: Callable[..., None], function: str) -> None:
        mig_machine(f"fail nvmlDeviceGet{function} * 4")
        card = nvml.cards()[1]
        assert (card.uuid, card.instances) == (UUIDS[1], ())
        assert str(card.problem).startswith("MIG: Insufficient Permissions")
        assert nvml.memory("MIG-dddd4444") == (350, 400)


class TestCudaUuid:
    @pytest.fixture
    def cuda(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
        """CUDA has one device, of the UUID that this is called with."""

        def say(uuid: str) -> None:
            monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
            monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
            monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: types.SimpleNamespace(uuid=uuid))

        return say

    @pytest.mark.usefixtures("machine", "no_cuda")
    def test_by_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
        assert [nvml.cuda_uuid(i) for i in range(3)] == [UUIDS[2], UUIDS[0], None]
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
        assert [nvml.cuda_uuid(i) for i in range(4)] == [*UUIDS, None]

    @pytest.mark.parametrize("uuid", ["cccc3333", "GPU-cccc3333"])
    def test_cuda_knows_best(
        self, machine: Callable[..., None], cuda: Callable[[str], None], uuid: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """CUDA's own answer counts, for the environment says nothing of CUDA_DEVICE_ORDER."""
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
        cuda(uuid)
        assert nvml.cuda_uuid(0) == UUIDS[2]

    @pytest.mark.parametrize("uuid", ["eeee6666", "MIG-eeee6666", "aabb2222"])
    def test_of_an_instance(
        self, mig_machine: Callable[..., None], cuda: Callable[[str], None], uuid: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """CUDA names it without a prefix, or names its card."""
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-e")
        cuda(uuid)
        assert nvml.cuda_uuid(0) == "MIG-eeee6666"

    @pytest.mark.parametrize(("uuid", "name"), [("cccc3333", UUIDS[2]), (UUIDS[2], UUIDS[2]), ("MIG-d", "MIG-d")])
    def test_without_nvml(self, nvml_stub: NvmlStub, cuda: Callable[[str], None], uuid: str, name: str) -> None:
        nvml_stub.describe("init 9")
        cuda(uuid)
        assert nvml.cuda_uuid(0) == name


class TestSession:
    def test_opened_on_first_use_and_once(self, nvml_stub: NvmlStub) -> None:
        before = nvml_stub.count("initialisations")
        for _ in range(3):
            nvml.memory(UUIDS[0])
            nvml.visible_uuids(None)
        assert nvml.session() is pynvml
        assert nvml.unavailable() is None
        assert nvml_stub.count("initialisations") == before + 1

    def test_from_several_threads_at_once(self, machine: Callable[..., None], nvml_stub: NvmlStub) -> None:
        together, readings, before = threading.Barrier(8), [], nvml_stub.count("initialisations")

        def read() -> None:
            together.wait(30)
            readings.append(nvml.memory(UUIDS[1]))

        threads = [threading.Thread(target=read) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert readings == [(200, 1000)] * 8
        assert nvml_stub.count("initialisations") == before + 1

    def test_forgotten_on_request(self, nvml_stub: NvmlStub) -> None:
        before = nvml_stub.count("initialisations"), nvml_stub.count("shutdowns")
        nvml.session()
        nvml.reset()
        nvml.session()
        nvml.reset()
        nvml.reset()
        assert (nvml_stub.count("initialisations"), nvml_stub.count("shutdowns")) == (before[0] + 2, before[1] + 2)

    @pytest.mark.usefixtures("no_cuda")
    @pytest.mark.parametrize(
        ("obstacle", "reason"),
        [
            ("not installed", "import of pynvml halted; None in sys.modules; pip install nvidia-ml-py"),
            ("no library", "NVML Shared Library Not Found: there is no NVIDIA driver"),
            ("init 9", "Driver Not Loaded: load the NVIDIA driver"),
            (
                "init 18",
                "RM has detected an NVML/RM version mismatch.: the NVIDIA driver's library and its kernel module",
            ),
            ("init 4", "Insufficient Permissions"),
            ("init 999", "Unknown Error"),
            ("init 77", "an error of the stub"),
        ],
    )
    def test_unavailable(
        self,
        obstacle: str,
        reason: str,
        nvml_stub: NvmlStub,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        if obstacle == "not installed":
            monkeypatch.setitem(sys.modules, "pynvml", None)
        elif obstacle == "no library":
            monkeypatch.setattr(pynvml, "CDLL", lambda name: ctypes.CDLL(f"/nowhere/{name}"))
        else:
            nvml_stub.describe(obstacle, *CARDS)
        with caplog.at_level(logging.INFO):
            assert nvml.session() is None
            assert str(nvml.unavailable()).startswith(reason)
            assert nvml.memory(UUIDS[0]) is nvml.utilization(UUIDS[0]) is None
            assert nvml.reading(UUIDS[0]) == (None, None, None, (nvml.unavailable(),))
            assert nvml.visible_uuids(None) == nvml.visible_uuids("0") == []
            assert nvml.cuda_uuid(0) is None
            with pytest.raises(NvmlError, match="^" + reason.partition(":")[0]):
                nvml.cards()
        assert [record.message for record in caplog.records] == [f"no NVML readings: {nvml.unavailable()}"], "said once"

    @pytest.mark.parametrize("function", ["nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetUUID"])
    def test_cards_that_cannot_be_listed(self, machine: Callable[..., None], function: str) -> None:
        machine(f"fail {function} * 999")
        assert nvml.visible_uuids(None) == nvml.visible_uuids("0") == []


class TestVersions:
    def test_library_from_before_mig(
        self, tmp_path_factory: pytest.TempPathFactory, nvml_stub: NvmlStub, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What it has is read, the older list of processes too."""
        old = NvmlStub(tmp_path_factory.mktemp("old"), "-DOLD")
        old.describe(*CARDS)
        old.load(monkeypatch)
        assert nvml.cards() == tuple(Card(i, uuid, f"Stub {uuid[:8]}") for i, uuid in enumerate(UUIDS))
        processes = (Process(41, "python train.py", 600), Process(42, "/usr/bin/python3", None))
        assert nvml.reading(UUIDS[0]) == ((100, 1000), 0.25, processes, ())
        with pytest.raises(pynvml.NVMLError, match="Function Not Found"):
            pynvml.nvmlDeviceGetMigMode(pynvml.nvmlDeviceGetHandleByUUID(UUIDS[0]))

    def test_function_missing_in_the_library(self, machine: Callable[..., None]) -> None:
        machine("fail nvmlDeviceGetUtilizationRates * 13")
        reason = "utilization: Function Not Found: the NVIDIA driver is too old for that"
        assert nvml.reading(UUIDS[1]) == ((200, 1000), None, (), (reason,))

    def test_function_missing_in_pynvml(self, machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
        for version in ("v2", "v3"):
            monkeypatch.delattr(pynvml, f"nvmlDeviceGetComputeRunningProcesses_{version}")
        (problem,) = nvml.reading(UUIDS[0]).problems
        assert problem.startswith("processes: this pynvml has no nvmlDeviceGetComputeRunningProcesses_v2; pip install")
        assert nvml.memory(UUIDS[0]) == (100, 1000)

    def test_names_as_bytes(self, machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
        """Versions of pynvml before 11.5 return them so."""
        text = pynvml.nvmlDeviceGetUUID
        monkeypatch.setattr(pynvml, "nvmlDeviceGetUUID", lambda handle: text(handle).encode())
        assert nvml.visible_uuids("GPU-cc") == [UUIDS[2]]


def test_own_process_loads_the_library_by_its_name(nvml_library: NvmlStub) -> None:
    nvml_library.describe(*CARDS)
    code = "from managed_exec.devices import nvml; print(nvml.memory('GPU-aabb2222'), nvml.unavailable())"
    run = run_python(code, **nvml_library.environment)
    assert run.stdout == "NvmlMemory(free_bytes=200, total_bytes=1000) None\n", run.stderr
