"""Apply one network to a long stream of images, with a bounded number of bytes on their way.

    python examples/batch_inference.py                           # the machine's GPUs, or its CPU
    python examples/batch_inference.py --sim 4x64MiB             # four simulated devices
    python examples/batch_inference.py --sim 4x64MiB --in-flight 16MiB --batches 400

The network is brought to each device once, by the first task there that asks for it. Batches are made when there is
room for them: `pool.map(..., in_flight="2MiB")` submits the next one only where its bytes, and those of the scores that
are expected of it, fit beside all that was submitted and not taken yet. Both are checked, and the scores are compared
with those of one device.
"""

from __future__ import annotations

import argparse
import copy
import threading
import time
import weakref
from collections.abc import Iterator
from functools import partial

import cifar
import torch
from options import parsed, positive
from torch import Tensor, nn

from managed_exec import GPUPoolExecutor, ManagedModule, current_task, device_manager
from managed_exec.sizes import format_bytes, parse_bytes


class PerDevice:
    """A network, on every device that it was asked for."""

    def __init__(self, model: nn.Module) -> None:
        self.loads: list[torch.device] = []  # one entry each time it was brought to a device
        self._model = model
        self._copies: dict[torch.device, nn.Module] = {}
        # One a device, held while the network is brought there: the other tasks of that device wait, and no others.
        self._locks = {device: threading.Lock() for device in device_manager.devices}

    def get(self) -> nn.Module:
        """Return the network on the task's device. The tasks there share it, so they must not change it."""
        task = current_task()
        with self._locks[task.device]:
            if task.device not in self._copies:
                self.loads.append(task.device)
                # A managed module leaves the device when others need the room, and comes back when it is used.
                model = ManagedModule.from_module(copy.deepcopy(self._model)).to(task.device)
                if task.stream is not None:
                    task.stream.synchronize()  # other tasks use it in streams of their own
                self._copies[task.device] = model
            return self._copies[task.device]


def score(models: PerDevice, images: Tensor) -> Tensor:
    """Return the scores of *images*, [n, 10]."""
    return models.get()(images.cuda()).cpu()


class Stream:
    """Batches of generated images, and how many bytes of them there were at once."""

    def __init__(self, count: int, size: int) -> None:
        self.peak_bytes = 0
        self.batch_bytes = size * 3 * 32 * 32 * 8
        self.all_bytes = count * self.batch_bytes
        self._count = count
        self._size = size
        self._existing: weakref.WeakSet[Tensor] = weakref.WeakSet()

    def __iter__(self) -> Iterator[Tensor]:
        return map(self._make, range(self._count))  # refers to none of those it gave

    def _make(self, number: int) -> Tensor:
        generator = torch.Generator().manual_seed(number)
        images = torch.randn(self._size, 3, 32, 32, generator=generator, dtype=torch.float64)
        self._existing.add(images)
        self.peak_bytes = max(self.peak_bytes, sum(existing.nbytes for existing in self._existing))
        return images


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Apply one network to a stream of images.")
    parser.add_argument("--batches", type=positive, default=100, help="of the stream (%(default)s)")
    parser.add_argument("--batch", type=positive, default=8, help="images in each (%(default)s)")
    parser.add_argument("--hidden", type=positive, default=64, help="width of the network (%(default)s)")
    parser.add_argument("--in-flight", default="2MiB", help="bytes of batches and scores at once (%(default)s)")
    parser.add_argument("--workers", type=positive, default=8, help="batches at work at once (%(default)s)")
    options = parsed(parser, arguments, "4x64MiB")
    try:
        limit_bytes = parse_bytes(options.in_flight, name="--in-flight")
    except ValueError as wrong:
        parser.error(str(wrong))
    torch.set_num_threads(1)  # tasks run side by side already

    model = cifar.network(options.hidden).requires_grad_(False)
    models, stream = PerDevice(model), Stream(options.batches, options.batch)
    start_s = time.perf_counter()
    with GPUPoolExecutor(options.workers) as pool:
        scores = torch.cat(list(pool.map(partial(score, models), stream, in_flight=limit_bytes)))
    seconds = time.perf_counter() - start_s
    print(f"{options.batches} batches of {options.batch} images, {seconds:.1f} s")
    print(f"network brought to: {', '.join(map(str, models.loads))}")
    print(
        f"{format_bytes(stream.all_bytes)} of images, {format_bytes(stream.peak_bytes)} at once, "
        f"in flight at most {format_bytes(limit_bytes)}"
    )
    with GPUPoolExecutor(1, devices=1) as pool:
        again = Stream(options.batches, options.batch)
        expected = torch.cat(list(pool.map(partial(score, PerDevice(model)), again, in_flight=limit_bytes)))

    if len(models.loads) != len(set(models.loads)):
        raise SystemExit("the network was brought to a device more than once")
    # Beside those in flight there is the one that was made last, and a single one may be larger than the bound.
    if stream.peak_bytes > max(limit_bytes, stream.batch_bytes) + stream.batch_bytes:
        raise SystemExit("there were more bytes at once than that")
    furthest = ((scores - expected).abs().max() / expected.abs().max()).item()
    print(f"largest difference from the scores of one device: {furthest:.1e}, allowed {cifar.TOLERANCE:.0e}")
    if not furthest <= cifar.TOLERANCE:
        raise SystemExit("the scores are not those of one device")


if __name__ == "__main__":
    main()
