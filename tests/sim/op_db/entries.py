"""Which entries of the operator database are run, and with which samples."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch
from torch.testing._internal.common_methods_invocations import op_db

SEED = 1234
MAX_SAMPLES = 200  # of one entry; 15 entries make more, up to 1440, and are sampled evenly


def entries() -> list[Any]:
    """Return the entries that take float32 and need no CUDA JIT: 672 on torch 2.13.

    The jiterator entries are the only ones that compile CUDA source when called.
    """
    return [op for op in op_db if torch.float32 in op.supported_dtypes("cpu") and not op.name.startswith("jiterator_")]


def samples(op: Any, *, requires_grad: bool) -> list[Any]:
    """Return the samples of an entry, float32 on the CPU, the same ones in every process.

    Calls the sample function itself: ``OpInfo.sample_inputs`` walks the stack and seeds all device types before every
    sample, which costs more than most operators here.
    """
    random.seed(SEED)
    numpy.random.seed(SEED)
    torch.default_generator.manual_seed(SEED)
    made = list(op.sample_inputs_func(op, "cpu", torch.float32, requires_grad))
    return made[:: -(-len(made) // MAX_SAMPLES) or 1]
