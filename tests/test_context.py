"""What a task sees of its device. What its thread is like afterwards is ``test_context_restoration.py``'s matter."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable

import pytest
import torch
from conftest import Kind, allocated_bytes

from managed_exec import current_task, sim

WAIT_S = 30


def own_device() -> torch.device:
    current = current_task()
    assert current is not None
    return current.device


def in_task(kind: Kind, task: Callable[[], object], **options: object) -> object:
    with kind.pool(max_workers=1, **options) as pool:
        return pool.submit(task).result(WAIT_S)


class SaveDevice(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        self.register_buffer("count", torch.zeros(1))


def by_default_device() -> torch.Tensor:
    torch.set_default_device("cuda")
    try:
        return torch.ones(3)
    finally:
        torch.set_default_device(None)


def by_device_context() -> torch.Tensor:
    with torch.device("cuda"):
        return torch.ones(3)


BARE_CUDA: dict[str, Callable[[], torch.Tensor]] = {
    "factory": lambda: torch.zeros(3, device="cuda"),
    "factory with a torch.device": lambda: torch.zeros(3, device=torch.device("cuda")),
    "tensor from data": lambda: torch.tensor([1.0], device="cuda"),
    "as_tensor": lambda: torch.as_tensor([1.0], device="cuda"),
    "random": lambda: torch.randn(3, device="cuda"),
    "like": lambda: torch.zeros_like(torch.ones(3), device="cuda"),
    "new": lambda: torch.ones(3).new_zeros(2, device="cuda"),
    "cuda()": lambda: torch.ones(3).cuda(),
    "cuda(non_blocking)": lambda: torch.ones(3).cuda(non_blocking=True),
    "cuda('cuda')": lambda: torch.ones(3).cuda("cuda"),
    "cuda(device=)": lambda: torch.ones(3).cuda(device="cuda"),
    "cuda(None, True)": lambda: torch.ones(3).cuda(None, True),
    "cuda(memory_format)": lambda: torch.ones(1, 2, 3, 4).cuda(memory_format=torch.channels_last),
    "to(str)": lambda: torch.ones(3).to("cuda"),
    "to(device)": lambda: torch.ones(3).to(torch.device("cuda")),
    "to(device, dtype)": lambda: torch.ones(3).to("cuda", torch.float64),
    "to(device, dtype, non_blocking, copy)": lambda: torch.ones(3).to("cuda", torch.float32, False, True),
    "to(device=)": lambda: torch.ones(3).to(device="cuda", dtype=torch.float64),
    "module.cuda()": lambda: SaveDevice().cuda().layer.weight,
    "module.to()": lambda: SaveDevice().to("cuda").count,
    "module made there": lambda: torch.nn.Linear(2, 2, device="cuda").weight,
    "set_default_device": by_default_device,
    "with torch.device": by_device_context,
}


class TestBareCuda:
    @pytest.mark.parametrize("form", BARE_CUDA)
    def test_means_the_task_s_device(self, kind: Kind, form: str) -> None:
        def task() -> None:
            assert BARE_CUDA[form]().device == own_device()

        in_task(kind, task)

    def test_on_every_device(self, simulator: Kind) -> None:
        together = threading.Barrier(4)

        def task() -> tuple[torch.device, torch.device]:
            together.wait(WAIT_S)
            return own_device(), torch.ones(2).cuda().device

        with simulator.pool(max_workers=4) as pool:
            pairs = [future.result() for future in [pool.submit(task) for _ in range(4)]]
        assert all(own == got for own, got in pairs)
        assert len({own for own, _ in pairs}) == 4

    def test_factories_without_a_device_stay_on_the_cpu(self, kind: Kind) -> None:
        def task() -> None:
            assert torch.randn(3).device.type == "cpu"
            assert torch.ones(2).new_zeros(1).device.type == "cpu"
            assert torch.ones(3, device="cpu").device.type == "cpu"
            assert torch.ones(3).to(torch.float64).device.type == "cpu"
            assert torch.ones(3).to("cpu").device.type == "cpu"
            assert torch.nn.Linear(2, 2).weight.device.type == "cpu"

        in_task(kind, task)

    def test_explicit_index_is_respected(self, simulator: Kind) -> None:
        def task() -> None:
            for i in range(4):
                wanted = torch.device("sim", i)
                assert torch.ones(1, device=f"cuda:{i}").device == wanted
                assert torch.ones(1, device=torch.device("cuda", i)).device == wanted
                assert torch.ones(1).to(f"cuda:{i}").device == wanted
                assert torch.ones(1).cuda(i).device == wanted
                assert torch.ones(1, device=f"sim:{i}").device == wanted

        in_task(simulator, task)

    def test_index_that_does_not_exist_is_torch_s_error(self, kind: Kind) -> None:
        with kind.pool(max_workers=1) as pool:
            for task in (lambda: torch.ones(1, device="cuda:77"), lambda: torch.ones(1).cuda(77)):
                assert isinstance(pool.submit(task).exception(WAIT_S), (RuntimeError, AssertionError))

    def test_copy_on_the_cpu_does_not_share_memory_with_the_argument(self) -> None:
        """On a GPU ``x.cuda()`` never writes to ``x``; the same program must not either where there is none."""

        def double(x: torch.Tensor) -> torch.Tensor:
            return x.cuda().mul_(2), x.to("cuda").mul_(2)

        x = torch.ones(3)
        with Kind("cpu").pool(max_workers=1) as pool:
            doubled = pool.submit(double, x).result(WAIT_S)
        assert [y.tolist() for y in doubled] == [[2, 2, 2]] * 2
        assert x.tolist() == [1, 1, 1]

    def test_training_step_gives_the_cpu_s_values(self, kind: Kind) -> None:
        def train(device: str) -> list[float]:
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).to(device)
            optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
            x = torch.linspace(-1, 1, 20).reshape(5, 4).to(device)
            losses = []
            for _ in range(3):
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            return losses

        with kind.pool(max_workers=1) as pool:
            assert pool.submit(train, "cuda").result(WAIT_S) == pytest.approx(train("cpu"), rel=1e-5)


class TestCurrentTask:
    def test_outside_a_task(self, kind: Kind) -> None:
        assert current_task() is None
        assert in_task(kind, lambda: _in_thread(current_task)) is None

    def test_in_a_task(self, kind: Kind) -> None:
        with kind.pool(max_workers=1) as pool:
            first, second = pool.submit(current_task).result(), pool.submit(current_task).result()
        assert (first.id, second.id) == (0, 1)
        if kind.is_accelerator:
            assert first.stream.device == first.device
            assert first.stream == second.stream, "a worker keeps one stream per device"
        else:
            assert (first.device, first.stream) == (torch.device("cpu"), None)

    def test_current_device_and_stream_are_the_task_s(self, accelerator: Kind) -> None:
        def task() -> None:
            current = current_task()
            assert current is not None
            assert torch.accelerator.current_device_index() == current.device.index
            assert torch.accelerator.current_stream() == current.stream

        with accelerator.pool(max_workers=2) as pool:
            for future in [pool.submit(task) for _ in range(8)]:
                future.result(WAIT_S)

    def test_nested_pools(self, kind: Kind) -> None:
        def outer() -> tuple[object, ...]:
            before = current_task()
            with kind.pool(max_workers=1) as inner:
                inside = inner.submit(current_task).result(WAIT_S)
            return before, inside.id, current_task()

        before, inside_id, after = in_task(kind, outer)
        assert before == after
        assert inside_id == 0


class TestDeviceWork:
    """Order between the submitter's device work, the task's and the reader's, made visible by held streams."""

    def test_future_is_done_when_the_device_work_is(self, simulator: Kind) -> None:
        streams: list[torch.Stream] = []
        gate, copied = threading.Event(), threading.Event()

        def task() -> torch.Tensor:
            current = current_task()
            assert current is not None
            streams.append(current.stream)
            source = torch.full((1000,), 7.0).pin_memory()
            copied.set()
            assert gate.wait(WAIT_S)
            return source.to("cuda", non_blocking=True)

        with simulator.pool(max_workers=1, devices=1) as pool:
            future = pool.submit(task)
            assert copied.wait(WAIT_S)
            with sim.hold_stream(streams[0]):
                gate.set()
                with pytest.raises(concurrent.futures.TimeoutError):
                    future.result(timeout=0.1)
            assert future.result(WAIT_S).cpu().eq(7).all()
        del future

    def test_work_left_on_another_device_is_waited_for(self, simulator: Kind) -> None:
        default = torch.accelerator.current_stream(1)

        def task() -> torch.Tensor:
            return torch.full((1000,), 7.0).pin_memory().to("cuda:1", non_blocking=True)

        with simulator.pool(max_workers=1, devices=2, placement="pack") as pool:
            with sim.hold_stream(default):
                future = pool.submit(task)
                with pytest.raises(concurrent.futures.TimeoutError):
                    future.result(timeout=0.1)
            assert future.result(WAIT_S).cpu().eq(7).all()
        del future

    def test_task_waits_for_what_the_submitter_queued(self, simulator: Kind) -> None:
        source = torch.full((1000,), 7.0).pin_memory()
        target = torch.zeros(1000, device="sim:0")
        with simulator.pool(max_workers=1, devices=1) as pool:
            with sim.hold_stream(torch.accelerator.current_stream(0)):
                target.copy_(source, non_blocking=True)
                future = pool.submit(target.clone)
                with pytest.raises(concurrent.futures.TimeoutError):
                    future.result(timeout=0.1)
            assert future.result(WAIT_S).cpu().eq(7).all()
        del future

    def test_result_dropped_while_its_reader_is_busy(self, simulator: Kind) -> None:
        """The block of a result is not handed out again while the stream that reads it still does."""
        target = torch.empty(1000).pin_memory()
        default, reader = torch.accelerator.current_stream(0), torch.Stream("sim:0")
        with simulator.pool(max_workers=1, devices=1) as pool:
            torch.accelerator.set_stream(reader)
            result = pool.submit(lambda: {"values": [torch.full((1000,), 7.0, device="cuda")]}).result(WAIT_S)
            with sim.hold_stream(reader):
                target.copy_(result["values"][0], non_blocking=True)
                del result
                torch.accelerator.set_stream(default)
                other = pool.submit(lambda: torch.full((1000,), 9.0, device="cuda")).result(WAIT_S)
            reader.synchronize()
        assert target.eq(7).all()
        del other

    def test_error_of_the_device_is_the_task_s(self, simulator: Kind) -> None:
        with simulator.pool(max_workers=1, devices=2, placement="round-robin") as pool:
            assert pool.submit(own_device).result(WAIT_S).index == 0
            sim.faults.break_device(1)
            try:
                error = pool.submit(lambda: torch.ones(3, device="cuda")).exception(WAIT_S)
                assert isinstance(error, torch.AcceleratorError)
                assert "sim:1" in str(error)
                assert pool.submit(lambda: torch.ones(3, device="cuda").sum().item()).result(WAIT_S) == 3
            finally:
                sim.faults.clear()

    def test_own_error_comes_before_the_device_s(self, simulator: Kind, caplog: pytest.LogCaptureFixture) -> None:
        def task() -> None:
            sim.faults.break_device(0)
            raise ValueError("mine")

        with simulator.pool(max_workers=1, devices=1) as pool:
            error = pool.submit(task).exception(WAIT_S)
            sim.faults.clear()
        assert str(error) == "mine"
        assert "device reported" in caplog.text
        assert allocated_bytes() == 0


class TestTorchFeatures:
    """Parts of torch that look at modes and threads themselves work in a task."""

    def test_compile(self, kind: Kind) -> None:
        def task() -> torch.Tensor:
            return torch.compile(lambda x: (x * 2).sin(), backend="eager")(torch.ones(3, device="cuda"))

        assert torch.allclose(in_task(kind, task).cpu(), torch.full((3,), 2.0).sin())

    def test_checkpoint(self, kind: Kind) -> None:
        def task() -> list[float]:
            x = torch.ones(3, device="cuda", requires_grad=True)
            torch.utils.checkpoint.checkpoint(lambda x: (x * x).sum(), x, use_reentrant=False).backward()
            return x.grad.tolist()

        assert in_task(kind, task) == [2, 2, 2]

    def test_functional_transforms(self, kind: Kind) -> None:
        def task() -> list[list[float]]:
            return torch.func.vmap(torch.func.grad(lambda x: (x**3).sum()))(torch.ones(2, 2, device="cuda")).tolist()

        assert in_task(kind, task) == [[3, 3], [3, 3]]

    def test_data_loader_workers(self, kind: Kind) -> None:
        def task() -> list[float]:
            data = torch.utils.data.TensorDataset(torch.arange(4.0))
            loader = torch.utils.data.DataLoader(data, batch_size=2, num_workers=1, multiprocessing_context="spawn")
            return [batch.to("cuda").sum().item() for (batch,) in loader]

        assert in_task(kind, task) == [1, 5]


def _in_thread(function: Callable[[], object]) -> object:
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]
