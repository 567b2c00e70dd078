"""Enabling, reconfiguring, disabling; what happens in other processes and without a compiler."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import identity, run_python

from managed_exec import sim
from managed_exec.errors import SimulatorBusyError

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def disabled_afterwards() -> Iterator[None]:
    if torch.cuda.is_available():
        pytest.skip("the simulator would hide the real accelerator from later tests; set CUDA_VISIBLE_DEVICES=''")
    yield
    sim.disable()


def test_reconfiguration_is_refused_while_memory_is_in_use() -> None:
    sim.enable(2, "1MiB")
    tensor = torch.ones(1, device="sim:1")
    for change in (lambda: sim.enable(1), sim.disable):
        with pytest.raises(SimulatorBusyError, match=r"sim:1 512 B \(512 bytes\)"):
            change()
    assert torch.sim.device_count() == 2
    del tensor
    sim.enable(3, 2**21)
    assert torch.sim.device_count() == 3
    assert torch.sim.mem_get_info(2) == (2**21, 2**21)


def test_disable_hides_the_devices() -> None:
    sim.enable(1)
    assert sim.is_enabled()
    sim.disable()
    assert not sim.is_enabled()
    assert torch.accelerator.device_count() == 0
    assert not torch.accelerator.is_available()
    with pytest.raises(RuntimeError, match="invalid device index 0"):
        torch.ones(1, device="sim")
    torch.manual_seed(0)


def test_devices_added_after_a_backward_pass_have_one_too() -> None:
    for count in (1, 64):
        sim.enable(count, "1MiB")
        a = torch.ones(2, device=f"sim:{count - 1}", requires_grad=True)
        (a * 3).sum().backward()
        assert a.grad.tolist() == [3, 3]
        del a


@pytest.mark.parametrize(
    "arguments", [{"devices": 0}, {"devices": 65}, {"memory": "x"}, {"kernel_s": -1}, {"host_bandwidth": 0}]
)
def test_wrong_arguments(arguments: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(arguments))):
        sim.enable(**arguments)


@pytest.mark.parametrize(
    "arguments",
    [{"devices": "2"}, {"devices": 2.0}, {"devices": True}, {"host_bandwidth": "10GB"}, {"kernel_s": None}],
    ids=identity,
)
def test_arguments_of_a_wrong_type(arguments: dict[str, object]) -> None:
    with pytest.raises(TypeError, match=f"{next(iter(arguments))}: expected .*, got "):
        sim.enable(**arguments)


def test_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MANAGED_EXEC_SIM", raising=False)
    assert not sim.enable_from_environment()
    monkeypatch.setenv("MANAGED_EXEC_SIM", "3x2MiB")
    assert sim.enable_from_environment()
    assert torch.sim.device_count() == 3
    assert torch.sim.mem_get_info(0)[1] == 2 * 2**20
    for text in ("3", "x1GiB", "0x1GiB", "65x1GiB", "2x", "2x1Gib!", "-1x1GiB"):
        monkeypatch.setenv("MANAGED_EXEC_SIM", text)
        with pytest.raises(ValueError, match="like '4x1GiB'"):
            sim.enable_from_environment()


def test_importing_registers_nothing() -> None:
    result = run_python(
        "import torch; from managed_exec import sim\n"
        "assert torch._C._get_privateuse1_backend_name() == 'privateuseone' and not hasattr(torch, 'sim')\n"
        "assert not sim.is_enabled(); sim.disable()\n"
        "try: sim.set_capacity(0, 1)\n"
        "except RuntimeError as error: assert 'enable' in str(error)\n"
        "else: raise SystemExit(1)"
    )
    assert result.returncode == 0, result.stderr


def test_missing_compiler_and_failing_compiler(tmp_path: Path) -> None:
    code = "from managed_exec import sim; sim.enable()"
    result = run_python(code, PATH="", CXX="c++", TORCH_EXTENSIONS_DIR=str(tmp_path))
    assert "SimulatorUnavailableError" in result.stderr
    assert "install g++" in result.stderr
    broken = tmp_path / "broken-c++"
    broken.write_text(
        '#!/bin/sh\necho \'broken-c++ (GCC) 12.2.0\'\nif [ "$1" = --version -o "$1" = -dumpfullversion ]'
        "; then exit 0; fi\necho 'all is lost'\nexit 1\n"
    )
    broken.chmod(0o755)
    result = run_python(code, CXX=str(broken), TORCH_EXTENSIONS_DIR=str(tmp_path))
    assert "SimulatorUnavailableError" in result.stderr
    assert "all is lost" in result.stderr


def test_missing_ninja(tmp_path: Path) -> None:
    code = (
        "import shutil; which = shutil.which\n"
        "shutil.which = lambda name, *a, **k: None if name == 'ninja' else which(name, *a, **k)\n"
        "from managed_exec import sim; sim.enable()"
    )
    result = run_python(code, TORCH_EXTENSIONS_DIR=str(tmp_path))
    assert "SimulatorUnavailableError" in result.stderr
    assert "managed_exec[sim]" in result.stderr


def test_another_backend_has_the_place() -> None:
    result = run_python(
        "import torch; torch.utils.rename_privateuse1_backend('other'); from managed_exec import sim; sim.enable()"
    )
    assert "'other' has taken it" in result.stderr


def test_processes_fork_after_asynchronous_copies() -> None:
    result = run_python(
        "import os, torch; from managed_exec import sim; sim.enable(1); torch.set_num_threads(1)\n"
        "host = torch.ones(8).pin_memory(); host.to('sim', non_blocking=True); torch.sim.synchronize()\n"
        "pid = os.fork()\n"
        "assert not torch.sim._is_in_bad_fork()\n"
        "there = host.to('sim', non_blocking=True); torch.sim.synchronize(); assert there.sum().item() == 8\n"
        "if pid == 0: os._exit(0)\n"
        "assert os.waitpid(pid, 0)[1] == 0\n"
        "with sim.hold_stream(torch.sim.current_stream()):\n"
        "    host.to('sim', non_blocking=True); pid = os.fork()\n"
        "    if pid == 0: os._exit(7 if torch.sim._is_in_bad_fork() else 0)\n"
        "    assert os.waitpid(pid, 0)[1] == 7 << 8"
    )
    assert result.returncode == 0, result.stderr


def test_the_process_ends_while_copies_are_held() -> None:
    result = run_python(
        "import torch; from managed_exec import sim; sim.enable(1)\n"
        "hold = sim.hold_stream(torch.sim.current_stream()); hold.__enter__()\n"
        "a = torch.ones(8).pin_memory().to('sim', non_blocking=True); print('ended')"
    )
    assert result.returncode == 0, result.stderr
    assert "ended" in result.stdout
