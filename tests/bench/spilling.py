"""What moving tensors costs, as ratios within one run, on one simulated device whose kernels and links take time.

    python tests/bench/spilling.py [--rounds 5]

Time here is the simulator's: kernels and links are waited for without a processor, so that two of them side by side
take as long as the longer one. Our own work and the copies of bytes are real, and come on top.

1. A spill in one thread while another runs kernels: if they overlap, both take as long as the longer of the two.
2. Four times as much as the device holds: the time against that of the kernels plus the bytes moved over the link.
3. One operation on managed tensors without pressure, against plain ones and an empty subclass.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch

from managed_exec import GPUPoolExecutor, MemoryPolicy, sim
from managed_exec.memory.manager import configure, manager
from managed_exec.tensors.managed import ManagedTensor, manage

MIB = 2**20
# Bytes a second of the link, each way. Far below a real one, so that the bytes that a processor copies, poisons and
# pages in here, and that no processor touches with a real device, do not matter.
BANDWIDTH = 50e6
MOVED_BYTES = 4 * MIB
KERNEL_S = 2e-3
KERNELS = 40
PART_BYTES = MIB // 4
PARTS = 32
PASSES = 3
OPERATIONS = 5_000


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def side_by_side_s(*calls: Callable[[], object]) -> float:
    """Seconds until all of *calls*, each in a thread of its own, are done."""
    threads = [threading.Thread(target=call) for call in calls]

    def run() -> None:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return seconds(run)


# 1. Overlap


def run_kernels() -> None:
    with sim.kernel_time(KERNEL_S), torch.Stream("sim:0"):
        x = torch.zeros(8, device="sim:0")
        for _ in range(KERNELS):
            x.add_(1)


def in_own_stream(call: Callable[[], object]) -> Callable[[], object]:
    """As a task calls it."""

    def run() -> None:
        with torch.Stream("sim:0"):
            call()

    return run


def new_tensor(value: float) -> ManagedTensor:
    return manage(torch.full((MOVED_BYTES // 4,), value)).to("sim:0")


def print_overlap(rounds: int) -> None:
    sim.enable(devices=1, memory=8 * MOVED_BYTES, host_bandwidth=BANDWIDTH)
    configure(MemoryPolicy(min_bytes=1024))
    print(f"{'ms':34}{'kernels':>9}{'move':>9}{'both':>9}{'of sum':>9}{'of max':>9}")

    def row(name: str, ready: Callable[[ManagedTensor], object], move: Callable[[ManagedTensor], object]) -> None:
        tensor = new_tensor(1.0)
        figures = []
        for _ in range(rounds):
            ready(tensor)
            moving = seconds(in_own_stream(lambda: move(tensor)))
            ready(tensor)
            computing = seconds(run_kernels)
            both = side_by_side_s(run_kernels, in_own_stream(lambda: move(tensor)))
            figures.append(
                (computing, moving, both, both / (computing + moving), both / max(computing, moving)),
            )
        a, b, c, of_sum, of_max = (statistics.median(column) for column in zip(*figures, strict=True))
        print(f"{name:34}{a * 1e3:9.1f}{b * 1e3:9.1f}{c * 1e3:9.1f}{of_sum:9.2f}{of_max:9.2f}")

    for tier in ("host", "disk"):
        row(f"spill to {tier}", lambda t: t.unspill(), lambda t, tier=tier: t.spill(tier))
        row(f"unspill from {tier}", lambda t, tier=tier: t.spill(tier), lambda t: t.unspill())
    going, coming = new_tensor(1.0), new_tensor(2.0)
    figures = []
    for _ in range(rounds):
        going.unspill()
        coming.unspill()
        out = seconds(going.spill)
        coming.spill()
        back = seconds(coming.unspill)
        going.unspill()
        coming.spill()
        both = side_by_side_s(in_own_stream(going.spill), in_own_stream(coming.unspill))
        figures.append((out, back, both, both / (out + back), both / max(out, back)))
    a, b, c, of_sum, of_max = (statistics.median(column) for column in zip(*figures, strict=True))
    print(f"{'spill (first) beside unspill':34}{a * 1e3:9.1f}{b * 1e3:9.1f}{c * 1e3:9.1f}{of_sum:9.2f}{of_max:9.2f}")


# 2. Four times the device


def passes(share: int) -> float:
    """Write to every part of one of *share* equal shares of the working set, again and again."""
    parts = [torch.zeros(PART_BYTES // 4, device="cuda") for _ in range(PARTS // share)]
    for _ in range(PASSES):
        for part in parts:
            part.add_(1)
    return parts[-1][-1].item()


def training(share: int) -> float:
    """Train a deep network whose weights, gradients, momenta and activations are the working set."""
    width, layers = 256, 16 // share
    generator = torch.Generator().manual_seed(0)
    weights = [
        (torch.randn(width, width, generator=generator) / width**0.5).to("cuda").requires_grad_() for _ in range(layers)
    ]
    optimizer = torch.optim.SGD(weights, lr=0.01, momentum=0.9, foreach=False)
    x = torch.randn(width, width, generator=generator).to("cuda")
    for _ in range(2):
        optimizer.zero_grad()
        y = x
        for weight in weights:
            y = torch.tanh(y @ weight)
        loss = y.square().mean()
        loss.backward()
        optimizer.step()
    return loss.item()


def run_tasks(task: Callable[[int], float], tasks: int, policy: MemoryPolicy) -> tuple[float, list[float]]:
    """Return the seconds that *tasks* of them take side by side, and what they return."""
    with GPUPoolExecutor(tasks, devices=["sim:0"], memory=policy) as pool:
        start = time.perf_counter()
        futures: Sequence[Future[float]] = [pool.submit(task, tasks) for _ in range(tasks)]
        results = [future.result() for future in futures]
        return time.perf_counter() - start, results


def moved() -> tuple[int, int]:
    """Return the bytes that have gone out so far, and those that have come back."""
    now = manager().statistics()
    return sum(now.spilled_bytes.values()), sum(now.unspilled_bytes.values())


def four_times(name: str, task: Callable[[int], float], tasks: int, policy: MemoryPolicy, rounds: int) -> None:
    """Print the time with a quarter of the memory that *task* takes, against kernels and link."""
    figures = []
    run_tasks(task, tasks, policy)  # warm
    for _ in range(rounds):
        # With room and links that take no time: the kernels, and whatever an operation costs by itself.
        sim.enable(devices=1, memory="1GiB", kernel_s=KERNEL_S)
        computing, expected = run_tasks(task, tasks, policy)
        needed_bytes = torch.accelerator.max_memory_allocated(0)
        sim.enable(devices=1, memory=needed_bytes // 4, kernel_s=KERNEL_S, host_bandwidth=BANDWIDTH)
        before = moved()
        elapsed, results = run_tasks(task, tasks, policy)
        assert results == expected
        out, back = (now - then for now, then in zip(moved(), before, strict=True))
        bound = computing + (out + back) / BANDWIDTH
        overlapped = max(computing, out / BANDWIDTH, back / BANDWIDTH)
        figures.append((computing, out / MIB, back / MIB, elapsed, elapsed / bound, elapsed / overlapped))
    a, b, c, d, of_sum, of_max = (statistics.median(column) for column in zip(*figures, strict=True))
    print(
        f"{name:34}{a * 1e3:9.0f}{b:9.0f}{c:9.0f}{d * 1e3:9.0f}{of_sum:9.2f}{of_max:9.2f}  at most 1.3 of sum",
    )


def print_four_times(rounds: int) -> None:
    print(f"\n{'':34}{'kernels':>9}{'out':>9}{'back':>9}{'all':>9}{'of sum':>9}{'of max':>9}")
    print(f"{'':34}{'ms':>9}{'MiB':>9}{'MiB':>9}{'ms':>9}")
    for tier in ("host", "disk"):
        sim.enable(devices=1, memory="1GiB")
        policy = MemoryPolicy(min_bytes=1024, spill=(tier,), wait_s=60)
        for tasks in (1, 4):
            four_times(f"passes, {tasks} tasks, {tier}", passes, tasks, policy, rounds)
        for tasks in (1, 4):
            four_times(f"training, {tasks} tasks, {tier}", training, tasks, policy, rounds)


# 3. One operation


class Empty(torch.Tensor):
    """The least that a subclass with a dispatch level can do; what it costs is torch's part of what ours costs."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        with torch._C._DisableTorchDispatch():
            result = func(*args, **(kwargs or {}))
        return torch.Tensor._make_subclass(cls, result)

    __torch_function__ = torch._C._disabled_torch_function_impl


def add_s(a: torch.Tensor) -> float:
    """Seconds an addition."""
    for _ in range(OPERATIONS // 10):
        torch.add(a, a)
    start = time.perf_counter()
    for _ in range(OPERATIONS):
        torch.add(a, a)
    return (time.perf_counter() - start) / OPERATIONS


def print_operation(rounds: int) -> None:
    print(f"\n{'us an operation':34}{'plain':>9}{'this':>9}{'more':>9}")
    sim.enable(devices=1, memory="64MiB")
    configure(MemoryPolicy(min_bytes=1024))
    for device in ("cpu", "sim:0"):
        small, large = (torch.ones(n, device=device) for n in (4, 1024))
        rows: list[tuple[str, torch.Tensor, torch.Tensor, str]] = [
            ("empty subclass", small, torch.Tensor._make_subclass(Empty, small.clone()), ""),
            ("managed, too small to be moved", small, manage(small.clone()), ""),
            ("managed, 4 KiB", large, manage(large.clone()), "at most +10, aim +7"),
        ]
        for name, plain, ours, budget in rows:
            pairs = [(add_s(plain), add_s(ours)) for _ in range(rounds)]
            a, b = (statistics.median(column) for column in zip(*pairs, strict=True))
            more = statistics.median(second - first for first, second in pairs)
            print(f"{f'{name}, {device}':34}{a * 1e6:9.2f}{b * 1e6:9.2f}{more * 1e6:+9.2f}  {budget}")
        del small, large, rows, plain, ours


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    print_overlap(rounds)
    print_four_times(rounds)
    print_operation(rounds)


if __name__ == "__main__":
    main()
