"""The training example: what it prints for a device with room, for one a tenth the size, and for the CPU."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from programs import imported, run_example

SAME = "losses and weights are the same, bit for bit"


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    with imported("larger_than_memory") as module:
        yield module


def run_program(*options: str) -> subprocess.CompletedProcess[str]:
    return run_example("larger_than_memory", "--steps", "2", "--layers", "4", *options)


def number(text: str) -> int:
    return int(text.replace(",", ""))


def peaks(output: str, name: str) -> list[int]:
    """Return the peak bytes of each device that the program printed for one run."""
    line = re.search(rf"^{name}: .*peak bytes (.+)$", output, re.MULTILINE)
    return [number(text) for text in line[1].split(", ")]


def losses(output: str, name: str) -> tuple[float, float]:
    line = re.search(rf"^{name}: .*mean loss ([\d.]+) to ([\d.]+)", output, re.MULTILINE)
    return float(line[1]), float(line[2])


def test_sequences_follow_the_rule(example: ModuleType) -> None:
    numbers = example.sequences(5, 20, torch.Generator().manual_seed(0))
    assert numbers.shape == (5, 20)
    assert torch.equal(numbers[:, 1:], (3 * numbers[:, :-1] + 5) % example.MODULUS)


def test_model_does_not_look_ahead(example: ModuleType) -> None:
    torch.manual_seed(0)
    model = example.Transformer(width=8, layers=2, length=6)
    numbers = torch.arange(6).view(1, 6)
    changed = numbers.clone()
    changed[0, 4] = 11
    assert torch.equal(model(numbers)[:, :4], model(changed)[:, :4])
    assert not torch.equal(model(numbers)[:, 4:], model(changed)[:, 4:])


def test_comparison_sees_one_bit(example: ModuleType) -> None:
    def run(loss: float, weight: float) -> object:
        trained = example.Trained([loss], {"w": torch.tensor([0.5, weight])}, torch.device("cpu"))
        return example.Run([trained], seconds=0.0)

    assert example.same(run(1.0, 2.0), run(1.0, 2.0))
    assert not example.same(run(1.0, 2.0), run(1.0, 2.0000002))
    assert not example.same(run(1.0, 2.0), run(1.0000000000000002, 2.0))


@pytest.mark.timeout(400)  # the first use of the simulator compiles it
@pytest.mark.parametrize("devices", [1, 2])
def test_program_trains_in_a_tenth(devices: int) -> None:
    done = run_program("--sim", f"{devices}x128MiB")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    limit = number(re.search(r"^devices of ([\d,]+) bytes each", done.stdout, re.MULTILINE)[1])
    room = peaks(done.stdout, "with room")
    assert len(room) == devices
    assert limit == max(room) // 10
    assert "not managed: out of memory" in done.stdout
    assert all(0 < peak <= limit for peak in peaks(done.stdout, "managed"))
    first, last = losses(done.stdout, "managed")
    assert last < first
    assert losses(done.stdout, "with room") == (first, last)
    host = re.search(r"^host +([\d,]+) \( *(\d+)\) +([\d,]+) \( *(\d+)\) +([\d,]+)$", done.stdout, re.MULTILINE)
    spilled, spills, unspilled, unspills, there = (number(text) for text in host.groups())
    assert spilled > max(room)
    assert spills >= unspills > 0
    assert spilled >= unspilled > 0
    assert there == 0, "the tasks are done"
    assert SAME in done.stdout


@pytest.mark.timeout(400)  # the first use of the simulator compiles it
def test_program_fails_where_there_is_no_room_at_first() -> None:
    done = run_program("--sim", "1x64KiB")
    assert done.returncode == 1
    assert "with room: out of memory" in done.stdout
    assert SAME not in done.stdout
    assert "DeviceMemoryError" in done.stderr


def test_program_runs_on_the_cpu() -> None:
    done = run_program("--tasks", "2", "--layers", "1")
    assert done.returncode == 0, done.stderr
    assert SAME in done.stdout


@pytest.mark.parametrize("options", [("--tasks", "0"), ("--steps", "0"), ("--width", "6")])
def test_program_refuses_bad_sizes(options: tuple[str, str]) -> None:
    done = run_program(*options)
    assert done.returncode == 2
    assert "--width a multiple of 4" in done.stderr


@pytest.mark.parametrize("devices", ["4", "x1GiB", "4xbig"])
def test_program_refuses_bad_devices(devices: str) -> None:
    done = run_program("--sim", devices)
    assert done.returncode == 2
    assert "--sim takes NxSIZE" in done.stderr
