"""Operations of torch, by kind, for tests that compare managed tensors with plain ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

Call = Callable[..., Any]


def _index(t: torch.Tensor) -> torch.Tensor:
    """Indices into the first dimension: a plain tensor of the CPU."""
    return torch.arange(t.shape[0], device="cpu").flip(0)[::2]


ONE: list[Call] = [
    lambda t: t * 0.5 + 1,
    lambda t: t.tanh(),
    lambda t: t.square() * 0.25,
    lambda t: t.abs(),
    lambda t: t.clone(),
    lambda t: t.contiguous(),
    lambda t: t.flip(0),
    lambda t: t.cumsum(-1),
    lambda t: t.sort(0),
    lambda t: t.sum(),
    lambda t: t.sum(0),
    lambda t: t.mean(-1, keepdim=True),
    lambda t: t.amax(0),
    lambda t: t.max(-1),
    lambda t: t @ t.mT,
    lambda t: t[_index(t)],
    lambda t: t[t.abs() > 1],
    lambda t: t.index_select(0, _index(t)),
    lambda t: t.nonzero(),
    lambda t: t.to(torch.float64),
    lambda t: t.to(torch.complex64),
    lambda t: torch.softmax(t, -1),
    lambda t: torch.nn.functional.layer_norm(t, t.shape[-1:]),
    torch.zeros_like,
    torch.var_mean,
    copy.deepcopy,
    lambda t: copy.deepcopy([t, t[1:]]),
    lambda t: t.mul(other=t),
]
VIEW: list[Call] = [
    lambda t: t[1:],
    lambda t: t[..., ::2],
    lambda t: t[0],
    lambda t: t.mT,
    lambda t: t.transpose(0, -1),
    lambda t: t.unsqueeze(0),
    lambda t: t.reshape(-1),
    lambda t: t.view(2, -1),
    lambda t: t.conj(),
    lambda t: t.imag,
    lambda t: t.real,
    lambda t: t.conj().imag,
    torch.view_as_real,
    lambda t: t.diagonal(),
    lambda t: t.expand(2, *t.shape),
    lambda t: t.unfold(0, 2, 1),
    lambda t: t.split(3),
    lambda t: t.chunk(2, -1),
    lambda t: t.unbind()[-1],
    lambda t: t.view(torch.uint8),
    lambda t: t.detach(),
    lambda t: t.data,
    lambda t: t.squeeze(),
    lambda t: t.as_strided((2, 3), (3, 1)),
]
TWO: list[Call] = [
    lambda a, b: a + b,
    lambda a, b: a * b - a,
    lambda a, b: torch.where(a.abs() > b.abs(), a, b),
    lambda a, b: a @ b.mT,
    lambda a, b: torch.cat([a, b]),
    lambda a, b: torch.stack([b, a]),
    lambda a, b: torch.addcmul(a, b, b),
    torch.maximum,
    lambda a, b: torch.einsum("...i,...i->...", a, b),
    lambda a, b: torch.mul(input=a, other=b),
    lambda a, b: a.to(b.dtype) + b,
    lambda a, b: copy.deepcopy([a, b]),
]
WRITE: list[Call] = [
    lambda t: t.add_(1),
    lambda t: t.mul_(0.5),
    lambda t: t.zero_(),
    lambda t: t[0].fill_(3),
    lambda t: t[..., ::2].sub_(1),
    lambda t: t.mT.mul_(2),
    lambda t: t.index_fill_(0, _index(t), 2),
    lambda t: t.masked_fill_(t.abs() > 2, 1),
    lambda t: t.view(-1)[1:].add_(t.view(-1)[:-1].clone()) * 1,
    lambda t: t.cumsum_(0),
    lambda t: t.t_(),
    lambda t: t.squeeze_(),
    lambda t: t.conj().mul_(1j),
    lambda t: t.detach().add_(1),
    lambda t: t.requires_grad_(False),
]
WRITE_TWO: list[Call] = [
    lambda a, b: a.add_(b),
    lambda a, b: a.mul_(b),
    lambda a, b: a.__setitem__(slice(1), b[:1]) or a,
    lambda a, b: a.index_add_(0, _index(a), b[: (b.shape[0] + 1) // 2]),
    lambda a, b: a.addmm_(b.clone(), b.mT.clone()),  # copies: b may be a itself
    lambda a, b: torch.add(a, b, out=a),
    lambda a, b: torch._foreach_add_([a, a.detach()], [b, b]) or a,
]
GIVE_STORAGE: list[Call] = [lambda a, b: a.set_(b), lambda a, b: setattr(a, "data", b) or a]
