"""Which devices ``devices=`` asks for, and what is said when it cannot be had."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import Kind, identity, run_python

from managed_exec import GPUPoolExecutor, sim
from managed_exec.devices import resolve_devices
from managed_exec.devices.discovery import available_devices

# By name: torch has no device "sim" before the simulator was first enabled.
SIM = [f"sim:{i}" for i in range(4)]


def resolved(devices: object) -> list[str]:
    return [str(device.torch_device) for device in resolve_devices(devices)]  # type: ignore[arg-type]


@pytest.fixture
def no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without an accelerator."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)


class TestSimulated:
    """Four simulated devices."""

    @pytest.mark.parametrize(
        ("devices", "indices"),
        [
            (None, [0, 1, 2, 3]),
            (1, [0]),
            (3, [0, 1, 2]),
            (4, [0, 1, 2, 3]),
            ("sim", [0, 1, 2, 3]),
            ("sim:2", [2]),
            ("cuda", [0, 1, 2, 3]),
            ("cuda:3", [3]),
            ([0], [0]),
            ([2, 0], [2, 0]),
            ((1, 3), [1, 3]),
            ({1}, [1]),
            (range(1, 3), [1, 2]),
            (["sim:3", "sim:1"], [3, 1]),
            (["cuda"], [0, 1, 2, 3]),
            (["cuda:1", 2, "sim:3"], [1, 2, 3]),
        ],
        ids=identity,
    )
    def test_found(self, simulator: Kind, devices: object, indices: list[int]) -> None:
        assert resolved(devices) == [SIM[i] for i in indices]

    def test_torch_devices(self, simulator: Kind) -> None:
        assert resolved(torch.device("sim")) == SIM
        assert resolved(torch.device("cuda")) == SIM
        assert resolved(torch.device("cuda", 2)) == [SIM[2]]
        assert resolved([torch.device("sim", 3), torch.device("cuda", 1), 0, "sim:2"]) == [
            SIM[3],
            SIM[1],
            SIM[0],
            SIM[2],
        ]

    def test_one_pass_over_an_iterator(self, simulator: Kind) -> None:
        def indices() -> Iterator[int]:
            yield from (3, 1)

        assert resolved(indices()) == [SIM[3], SIM[1]]

    @pytest.mark.parametrize("devices", ["cpu", ["cpu"], ["cpu:0"], torch.device("cpu")], ids=identity)
    def test_cpu_beside_an_accelerator(self, simulator: Kind, devices: object) -> None:
        assert resolved(devices) == ["cpu"]

    @pytest.mark.parametrize(
        ("devices", "text"),
        [
            (0, "asked for 0, expected 1 to 4"),
            (-1, "asked for -1, expected 1 to 4"),
            (5, "asked for 5, expected 1 to 4"),
            ([], "asked for none, expected at least one"),
            ((), "asked for none"),
            ([4], "there is no device 4"),
            ([-1], "there is no device -1"),
            ("sim:4", "there is no device sim:4"),
            ("cuda:9", "there is no device cuda:9"),
            (["sim:0", "cuda:9"], "there is no device cuda:9"),
            ("mps", "there is no device mps"),
            ("meta", "there is no device meta"),
            ("gpu", "'gpu' is not a device"),
            ("", "'' is not a device"),
            ("sim:x", "'sim:x' is not a device"),
            ("cuda:-1", "'cuda:-1' is not a device"),
            ("0", "'0' is not a device"),
            ("cpu:1", "there is one CPU device, got 'cpu:1'"),
            ([0, 0], "sim:0 named more than once"),
            (["sim:1", 1, 2, "cuda:2"], "sim:1, sim:2 named more than once"),
            (["cuda", "cuda:0"], "sim:0 named more than once"),
            (["cpu", "cpu"], "cpu named more than once"),
            ([0, "cpu"], "a pool has devices of one kind, got cpu and sim"),
        ],
        ids=identity,
    )
    def test_not_there(self, simulator: Kind, devices: object, text: str) -> None:
        with pytest.raises(ValueError, match=r"^devices: ") as caught:
            resolve_devices(devices)  # type: ignore[arg-type]
        assert text in str(caught.value)
        assert str(caught.value).endswith("there is sim:0, sim:1, sim:2, sim:3")

    @pytest.mark.parametrize("devices", [1.5, True, False, object()], ids=identity)
    def test_no_form_of_devices(self, simulator: Kind, devices: object) -> None:
        with pytest.raises(TypeError, match=r"devices: expected a count, indices, strings or torch\.devices, got "):
            resolve_devices(devices)  # type: ignore[arg-type]

    @pytest.mark.parametrize("element", [None, 1.0, True, [0], b"sim:0"], ids=identity)
    def test_no_form_of_one_device(self, simulator: Kind, element: object) -> None:
        with pytest.raises(TypeError, match=r"devices: expected an index, a string or a torch\.device, got "):
            resolve_devices([0, element])  # type: ignore[list-item]

    def test_follows_the_simulator_s_size(self, simulator: Kind) -> None:
        sim.enable(devices=2, memory="1MiB")
        assert [str(device) for device in available_devices()] == SIM[:2]
        sim.disable()
        assert resolved(None) == ["cpu"]

    def test_the_pool_s_constructor_takes_the_same(self, simulator: Kind) -> None:
        with GPUPoolExecutor(1, devices=["cuda:2"]) as pool:
            assert str(pool.submit(lambda: torch.ones(1, device="cuda").device).result()) == SIM[2]
        with pytest.raises(ValueError, match="there is no device cuda:9; there is sim:0"):
            GPUPoolExecutor(devices="cuda:9")


@pytest.mark.usefixtures("no_accelerator")
class TestWithoutAccelerator:
    @pytest.mark.parametrize("devices", [None, 1, "cpu", "cpu:0", [0], ["cpu"], torch.device("cpu")], ids=identity)
    def test_falls_back_to_the_cpu(self, devices: object) -> None:
        assert resolved(devices) == ["cpu"]

    @pytest.mark.parametrize(
        ("devices", "text"),
        [
            (2, "asked for 2, expected 1 to 1"),
            ("cuda", "there is no device cuda"),
            ("cuda:0", "there is no device cuda:0"),
            ([1], "there is no device 1"),
            (torch.device("cuda", 0), "there is no device cuda:0"),
        ],
        ids=identity,
    )
    def test_what_is_not_there_names_the_way_out(self, devices: object, text: str) -> None:
        with pytest.raises(ValueError, match=f"^devices: {text}; there is cpu; managed_exec.sim.enable.*simulates"):
            resolve_devices(devices)  # type: ignore[arg-type]


def printed_by(code: str, **environment: str) -> str:
    """Return what *code* prints in a process of its own, in which it must not fail."""
    run = run_python(code, **environment)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


class TestOwnProcess:
    def test_environment_asks_for_the_simulator(self) -> None:
        code = (
            "import torch, managed_exec\n"
            "from managed_exec.devices import resolve_devices\n"
            "print([str(d.torch_device) for d in resolve_devices()], resolve_devices()[0].memory().total_bytes)\n"
            "print([str(d.torch_device) for d in resolve_devices('cuda:1')])\n"
        )
        assert printed_by(code, MANAGED_EXEC_SIM="2x3MiB").splitlines() == [
            f"['sim:0', 'sim:1'] {3 * 2**20}",
            "['sim:1']",
        ]

    def test_environment_that_cannot_be_read(self) -> None:
        code = (
            "from managed_exec import GPUPoolExecutor\n"
            "try: GPUPoolExecutor()\n"
            "except ValueError as error: print(error)\n"
        )
        text = printed_by(code, MANAGED_EXEC_SIM="many")
        assert text.startswith("MANAGED_EXEC_SIM: expected")
        assert "'many'" in text

    def test_nothing_is_created_at_import(self, tmp_path: Path) -> None:
        """No thread, no simulator, no CUDA, no NVML session; not by an idle pool either, but for its devices."""
        (tmp_path / "pynvml.py").write_text(
            "class NVMLError(Exception): pass\n"
            "def __getattr__(name):\n"
            "    if name.startswith('__'): raise AttributeError(name)\n"
            "    raise SystemExit(f'pynvml.{name} was used')\n"
        )
        code = (
            "import os, threading, torch\n"
            "def threads(): return len(os.listdir('/proc/self/task')) if os.path.isdir('/proc/self/task') else 0\n"
            "before = threads()\n"
            "import managed_exec\n"
            "from managed_exec.sim.build import loaded_backend\n"
            "def check():\n"
            "    assert threading.enumerate() == [threading.main_thread()]\n"
            "    assert threads() == before, (before, threads())\n"
            "    assert loaded_backend() is None\n"
            "    assert not managed_exec.sim.is_enabled()\n"
            "    assert not torch.cuda.is_initialized()\n"
            "    assert torch._C._get_privateuse1_backend_name() == 'privateuseone'\n"
            "check()\n"
            "del os.environ['MANAGED_EXEC_SIM']\n"
            "pool = managed_exec.GPUPoolExecutor()\n"
            "check()\n"
            "pool.shutdown()\n"
            "print('nothing')\n"
        )
        search_path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
        assert printed_by(code, PYTHONPATH=search_path, MANAGED_EXEC_SIM="2x1MiB") == "nothing"
