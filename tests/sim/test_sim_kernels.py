"""Kernels of the simulated device: the CPU's values, all or nothing, and the errors that CUDA raises."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from managed_exec import sim

pytestmark = pytest.mark.usefixtures("devices")


def test_operands_on_two_devices() -> None:
    a = torch.ones(2, device="sim:0")
    for b, other in ((torch.ones(2, device="sim:1"), "sim:1"), (torch.ones(2), "cpu")):
        for call in (lambda b=b: a + b, lambda b=b: a @ b, lambda b=b: torch.cat([a, b]), lambda b=b: a.add_(b)):
            expected = "Expected all tensors to be on the same device, but found at least two devices"
            with pytest.raises(RuntimeError, match=f"{expected}, sim:0 and {other}!"):
                call()
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(()).add_(a[0])


def test_numbers_and_indices_may_be_on_the_host() -> None:
    a = torch.arange(4.0, device="sim")
    assert (a + torch.tensor(1.0)).tolist() == [1, 2, 3, 4]
    assert (torch.tensor(2.0) * a).tolist() == [0, 2, 4, 6]
    assert a[torch.tensor([3, 0])].tolist() == [3, 0]
    a[torch.tensor([1])] = 9
    assert a.tolist() == [0, 9, 2, 3]
    assert (a[:1].int() + 1.5).dtype == torch.float32  # a Python number does not promote like a tensor


def test_results_that_the_schema_says_are_arguments_are_those_arguments() -> None:
    a, out = torch.ones(3, device="sim"), torch.empty(3, device="sim")
    assert a.add_(1) is a
    assert torch.add(a, 1, out=out) is out
    empty = torch.empty(0, device="sim")
    assert torch.add(a, 1, out=empty) is empty
    assert empty.tolist() == [3, 3, 3]


def test_out_that_is_a_view_and_out_that_cannot_grow() -> None:
    base = torch.zeros(4, device="sim")
    torch.add(torch.ones(2, device="sim"), 1, out=base[1:3])
    assert base.tolist() == [0, 2, 2, 0]
    out = torch.empty(0, device="sim")
    a = torch.ones(2**17, device="sim")
    with pytest.raises(torch.OutOfMemoryError):
        torch.cat([a, a], out=out)
    assert out.shape == (0,)


def test_strides_are_the_cpus() -> None:
    a = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    for function in (torch.relu, lambda t: t + 1, lambda t: t.transpose(0, 1) * 2, torch.fft.fft):
        on_device, on_host = function(a.to("sim")), function(a)
        assert on_device.stride() == on_host.stride()
        assert torch.equal(on_device.cpu(), on_host)


def test_views_share_memory() -> None:
    a = torch.arange(12.0, device="sim").reshape(3, 4)
    a[1].zero_()
    a.t()[0].add_(100)
    a.unfold(1, 2, 2)[0, 1, 0] = -1
    host = torch.arange(12.0).reshape(3, 4)
    host[1].zero_()
    host.t()[0].add_(100)
    host[0, 2] = -1
    assert torch.equal(a.cpu(), host)


def test_conjugate_and_negative_views() -> None:
    host = torch.randn(3, 3, dtype=torch.complex64)
    a = host.to("sim")
    assert a.conj().is_conj()
    for function in (
        lambda t: t.conj() @ t.mH,
        lambda t: torch.fft.fft(t.conj()),
        lambda t: t.conj().imag + 1,
        lambda t: t.conj().clone(),
        lambda t: torch.dot(t[0].conj(), t[1]),
    ):
        torch.testing.assert_close(function(a).cpu(), function(host))
    assert torch.equal(a.conj().cpu(), host.conj())
    b = a.clone()
    b.conj().copy_(host.conj())
    assert torch.equal(b.cpu(), host)
    assert torch.equal(a.conj().imag.cpu(), host.conj().imag)


# Fails in the last of the allocations that the call makes; the state must be as before, and a second try must work.
def fails_then_works(call: Callable[[], object], state: Callable[[], list[torch.Tensor]]) -> None:
    before = [t.cpu().clone() for t in state()]
    n = 1
    while True:
        sim.faults.clear()
        sim.faults.fail_allocation(n)
        try:
            call()
        except torch.OutOfMemoryError:
            for kept, now in zip(before, state(), strict=True):
                assert torch.equal(kept, now.cpu())
            n += 1
            continue
        break
    sim.faults.clear()
    assert n > 1, "no allocation failed"


def test_batch_norm_keeps_its_statistics_when_memory_runs_out() -> None:
    norm, reference = nn.BatchNorm1d(3).to("sim"), nn.BatchNorm1d(3)
    x = torch.randn(4, 3)
    on_device = x.to("sim")
    # num_batches_tracked is counted in Python before the kernel
    statistics = lambda: [norm.running_mean, norm.running_var]  # noqa: E731
    fails_then_works(
        lambda: torch.native_batch_norm(on_device, norm.weight, norm.bias, *statistics(), True, 0.1, 1e-5), statistics
    )
    reference(x)
    torch.testing.assert_close(norm.running_mean.cpu(), reference.running_mean)
    torch.testing.assert_close(norm.running_var.cpu(), reference.running_var)


def test_generators_keep_their_state_when_memory_runs_out() -> None:
    x = torch.ones(8, device="sim")
    torch.sim.manual_seed_all(1)
    fails_then_works(lambda: torch.native_dropout(x, 0.5, True), lambda: [torch.sim.get_rng_state()])
    torch.sim.manual_seed_all(1)
    fails_then_works(lambda: torch.bernoulli(x * 0.5), lambda: [torch.sim.get_rng_state()])


def test_foreach_operators_are_one_kernel() -> None:
    parameters = [torch.ones(2, device="sim"), torch.ones(3, device="sim:0", dtype=torch.float64)]
    with pytest.raises(RuntimeError):
        torch._foreach_add_(parameters, [torch.ones(2, device="sim"), torch.ones(4, device="sim")])
    assert [p.tolist() for p in parameters] == [[1, 1], [1, 1, 1]]


def test_a_kernel_that_raises_half_way_changes_nothing() -> None:
    target = torch.zeros(4, device="sim")
    index = torch.tensor([0, 1, 9], device="sim")
    with pytest.raises((IndexError, RuntimeError)):
        target.scatter_(0, index, 1.0)
    assert target.tolist() == [0, 0, 0, 0]


def test_random_numbers_are_the_cpus() -> None:
    for draw in (
        lambda d, g: torch.randn(5, device=d, generator=g),
        lambda d, g: torch.rand(5, device=d, generator=g),
        lambda d, g: torch.randint(100, (5,), device=d, generator=g),
        lambda d, g: torch.randperm(7, device=d, generator=g),
        lambda d, g: torch.empty(4, device=d).exponential_(generator=g),
        lambda d, g: torch.multinomial(torch.ones(5, device=d), 3, generator=g),
    ):
        generators = [torch.Generator(d).manual_seed(3) for d in ("sim", "cpu")]
        assert torch.equal(draw("sim", generators[0]).cpu(), draw("cpu", generators[1]))
        torch.manual_seed(4)
        on_host = draw("cpu", None)
        torch.manual_seed(4)
        assert torch.equal(draw("sim", None).cpu(), on_host)
    with pytest.raises(RuntimeError, match="generator"):
        torch.randn(2, device="sim", generator=torch.Generator())


def test_generator_states() -> None:
    generator = torch.Generator("sim:1").manual_seed(5)
    assert generator.device == torch.device("sim:1")
    state = generator.get_state()
    first = torch.rand(3, device="sim:1", generator=generator)
    generator.set_state(state)
    assert torch.equal(torch.rand(3, device="sim:1", generator=generator), first)
    torch.sim.set_rng_state(torch.sim.get_rng_state(0), 1)
    assert torch.equal(torch.rand(3, device="sim:0").cpu(), torch.rand(3, device="sim:1").cpu())
    with torch.random.fork_rng(devices=[0, 1], device_type="sim"):
        torch.manual_seed(0)
    clone = generator.clone_state()
    assert torch.equal(
        torch.rand(2, device="sim:1", generator=clone), torch.rand(2, device="sim:1", generator=generator)
    )


def same_training(module: nn.Module, *inputs: torch.Tensor) -> None:
    """Compare outputs and gradients of a module on the device and on the CPU."""
    results = []
    for device in ("sim", "cpu"):
        model = copy.deepcopy(module).to(device)
        arguments = [x.to(device).requires_grad_() for x in inputs]
        output = model(*arguments)
        output = output[0] if isinstance(output, tuple) else output
        (output * torch.linspace(0, 1, output.numel(), device=device).reshape(output.shape)).sum().backward()
        results.append([output, *(x.grad for x in arguments), *(p.grad for p in model.parameters())])
    for on_device, on_host in zip(*results, strict=True):
        assert on_device.device.type == "sim"
        torch.testing.assert_close(on_device.cpu(), on_host)


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Conv1d(2, 4, 3, padding=1), (2, 2, 7)),
        (nn.Conv2d(2, 4, 3, groups=2, bias=False), (2, 2, 6, 6)),
        (nn.ConvTranspose2d(2, 3, 3, stride=2), (2, 2, 4, 4)),
        (nn.Conv3d(1, 2, 2), (1, 1, 3, 4, 4)),
        (nn.LSTM(3, 4, num_layers=2, bidirectional=True), (5, 2, 3)),
        (nn.LSTM(3, 4, bias=False, proj_size=2), (5, 2, 3)),
        (nn.GRU(3, 4, num_layers=2), (5, 2, 3)),
        (nn.GRU(3, 4, bias=False), (5, 2, 3)),
        (nn.RNN(3, 4), (5, 2, 3)),
        (nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), (2, 3, 8)),
        (nn.Sequential(nn.BatchNorm1d(4), nn.LayerNorm(4), nn.GELU()), (5, 4)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None,
)
def test_modules_train_as_on_the_cpu(module: nn.Module, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    same_training(module, torch.randn(shape))


def test_packed_sequences() -> None:
    lengths = torch.tensor([3, 1])
    x = torch.randn(2, 3, 2)
    packed = nn.utils.rnn.pack_padded_sequence(x.to("sim"), lengths, batch_first=True)
    assert packed.batch_sizes.device.type == "cpu"
    lstm = nn.LSTM(2, 3)
    expected = lstm(nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True))[0].data
    torch.testing.assert_close(lstm.to("sim")(packed)[0].data.cpu(), expected)


def test_attention_gives_the_cpus_values() -> None:
    host = [torch.randn(1, 2, 5, 8, requires_grad=True) for _ in range(3)]
    device = [t.detach().to("sim").requires_grad_() for t in host]
    for arguments in (host, device):
        nn.functional.scaled_dot_product_attention(*arguments, is_causal=True).square().sum().backward()
    for on_device, on_host in zip(device, host, strict=True):
        assert torch.equal(on_device.grad.cpu(), on_host.grad)


def test_backward_over_two_devices() -> None:
    a = torch.randn(3, device="sim:0", requires_grad=True)
    b = torch.randn(3, requires_grad=True)
    (a.to("sim:1") * b.to("sim:1")).sum().cpu().backward()
    assert torch.equal(a.grad.cpu(), b.detach())
    assert torch.equal(b.grad, a.detach().cpu())


def test_optimizers() -> None:
    for make in (torch.optim.Adam, torch.optim.SGD, torch.optim.AdamW):
        for options in ({"foreach": True}, {"foreach": False}, {"fused": True}):
            weights = [torch.ones(3, device=d, requires_grad=True) for d in ("sim", "cpu")]
            for weight in weights:
                optimizer = make([weight], lr=0.1, **options)
                for _ in range(2):
                    weight.grad = torch.full_like(weight, 0.5)
                    optimizer.step()
            torch.testing.assert_close(weights[0].detach().cpu(), weights[1].detach())


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_sparse_tensors() -> None:
    dense = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
    for sparse in (dense.to_sparse(), dense.to_sparse_csr()):
        a = sparse.to("sim")
        assert a.values().device.type == "sim"
        assert torch.equal(a.cpu().to_dense(), dense)
        assert torch.equal((a @ dense.to("sim")).cpu(), dense @ dense)
    coo = dense.to("sim").to_sparse()
    coo.add_(coo)
    assert torch.equal(coo.to_dense().cpu(), 2 * dense)
    embedding = nn.Embedding(5, 2, sparse=True).to("sim")
    embedding(torch.tensor([1, 1, 3], device="sim")).sum().backward()
    torch.optim.SparseAdam(embedding.parameters()).step()
    assert embedding.weight.grad.is_sparse


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors() -> None:
    parts = [torch.ones(2), torch.ones(3)]
    nested = torch.nested.nested_tensor(parts, device="sim")
    assert (nested + 1).to_padded_tensor(0.0).tolist() == [[2, 2, 0], [2, 2, 2]]
    jagged = torch.nested.nested_tensor(parts, device="sim", layout=torch.jagged)
    assert jagged.exp().device.type == "sim"


def test_autocast_lowers_products_and_keeps_losses() -> None:
    a = torch.ones(2, 2, device="sim")
    with torch.autocast("sim", dtype=torch.bfloat16):
        assert (a @ a).dtype == torch.bfloat16
        assert nn.functional.conv1d(a[None], a[None]).dtype == torch.bfloat16
        assert torch.softmax(a.bfloat16(), 0).dtype == torch.float32
    assert (a @ a).dtype == torch.float32


def test_a_subclass_with_torch_dispatch_whose_storage_comes_and_goes() -> None:
    class Tracked(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            plain = torch.utils._pytree.tree_map_only(cls, lambda t: t.plain, (args, kwargs or {}))
            return func(*plain[0], **plain[1])

    base = torch.arange(4.0, device="sim")
    tracked = torch.Tensor._make_subclass(Tracked, base)
    tracked.plain = base
    saved = base.cpu()
    base.untyped_storage().resize_(0)
    assert torch.sim.memory_allocated() == 0
    base.untyped_storage().resize_(16)
    base.copy_(saved)
    assert (tracked + 1).tolist() == [1, 2, 3, 4]
