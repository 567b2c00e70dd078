"""What ``tests/test_task.py`` asks of every kind of device, on a real accelerator."""

from __future__ import annotations

import pytest

from .conftest import HAS_ACCELERATOR, WHY_NOT

if not HAS_ACCELERATOR:
    pytest.skip(WHY_NOT, allow_module_level=True)

from test_task import *  # noqa: F403 every class of the contract, also those to come
