"""The constructor's arguments, checked one by one."""

from __future__ import annotations

import pytest

from managed_exec import GPUPoolExecutor, MemoryPolicy
from managed_exec.config import checked_max_workers, checked_placement, checked_tasks_per_device
from managed_exec.scheduling.placement import PLACEMENTS, least_loaded, pack, round_robin

CHECKS = {"max_workers": checked_max_workers, "tasks_per_device": checked_tasks_per_device}


@pytest.mark.parametrize("name", CHECKS)
class TestNumbers:
    @pytest.mark.parametrize("number", [None, 1, 2, 10**6])
    def test_good(self, name: str, number: int | None) -> None:
        assert CHECKS[name](number) == number

    @pytest.mark.parametrize("number", [0, -1, -(10**9)])
    def test_too_small(self, name: str, number: int) -> None:
        with pytest.raises(ValueError, match=f"^{name} must be greater than 0, got {number}$"):
            CHECKS[name](number)

    @pytest.mark.parametrize("number", [True, False, 1.0, "4", [1], object])
    def test_not_a_number(self, name: str, number: object) -> None:
        with pytest.raises(TypeError, match=f"^{name}: expected an int or None, got "):
            CHECKS[name](number)  # type: ignore[arg-type]


class TestPlacement:
    @pytest.mark.parametrize(
        ("name", "function"), [("least-loaded", least_loaded), ("round-robin", round_robin), ("pack", pack)]
    )
    def test_by_name(self, name: str, function: object) -> None:
        assert checked_placement(name) is function

    def test_every_name_is_known(self) -> None:
        assert all(checked_placement(name) is function for name, function in PLACEMENTS.items())

    def test_own_function(self) -> None:
        def first(devices, request):
            return devices[0].position

        assert checked_placement(first) is first

    @pytest.mark.parametrize("name", ["", "fastest", "least_loaded", "PACK"])
    def test_unknown_name(self, name: str) -> None:
        with pytest.raises(ValueError, match=f"least-loaded, round-robin, pack or a function, got {name!r}"):
            checked_placement(name)

    @pytest.mark.parametrize("placement", [None, 3, ("pack",), b"pack"])
    def test_neither_name_nor_function(self, placement: object) -> None:
        with pytest.raises(TypeError, match="placement: expected a name or a function, got "):
            checked_placement(placement)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {"max_workers": 0},
        {"tasks_per_device": 0},
        {"placement": "fastest"},
        {"devices": []},
        {"devices": "nowhere"},
        {"initializer": 3},
    ],
    ids=str,
)
def test_a_pool_that_was_not_made_leaves_nothing(options: dict[str, object]) -> None:
    """What is wrong fails in the constructor, before any thread; the ``nothing_left`` fixture looks at these."""
    with pytest.raises((TypeError, ValueError)):
        GPUPoolExecutor(**{"devices": "cpu", **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("memory", ["1GB", 5, {"min_bytes": 1}, MemoryPolicy])
def test_memory_is_a_policy(memory: object) -> None:
    with pytest.raises(TypeError, match="memory: expected a MemoryPolicy, None for the default one or False"):
        GPUPoolExecutor(memory=memory)  # type: ignore[arg-type]


def test_inherit_context_is_a_bool() -> None:
    with pytest.raises(TypeError, match="inherit_context: expected True or False, got 'no'"):
        GPUPoolExecutor(inherit_context="no")  # type: ignore[arg-type]
