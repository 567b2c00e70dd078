"""What is known of the memory that a function's tasks need: estimates, bounds, names and files."""

from __future__ import annotations

import functools
import json
import os
import threading
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from managed_exec import gpu_task
from managed_exec.scheduling.footprints import _MAX_FUNCTIONS, _MAX_RECENT, _MAX_SIZES, Footprints, function_name

MIB = 2**20


def footprints_of(*pairs: tuple[int, int], name: str = "f") -> Footprints:
    footprints = Footprints()
    for argument_bytes, peak_bytes in pairs:
        footprints.note(name, argument_bytes, peak_bytes)
    return footprints


class TestEstimate:
    @pytest.mark.parametrize(
        ("seen", "argument_bytes", "estimate"),
        [
            ([], 0, None),
            ([(0, 5)], 0, 5),
            ([(0, 5), (0, 3)], 0, 5),
            ([(100, 300)], 100, 300),
            # Larger arguments: the need may grow with them.
            ([(100, 300)], 120, 360),
            ([(100, 300)], 1000, 3000),
            # Smaller ones: nothing says that it shrinks.
            ([(100, 300)], 10, 300),
            # The tightest bound counts. A small task of fixed need does not make a large one enormous.
            ([(1, 1000), (1000, 2000)], 4000, 8000),
            ([(1, 1000), (1000, 2000)], 500, 2000),
            ([(1, 10), (1000, 2000)], 100, 1000),
            # Tasks without tensors count for those with, only if there are no others.
            ([(0, 7)], 1000, 7),
            ([(0, 7), (10, 20)], 1000, 2000),
        ],
    )
    def test_table(self, seen: list[tuple[int, int]], argument_bytes: int, estimate: int | None) -> None:
        assert footprints_of(*seen).estimate("f", argument_bytes) == estimate

    def test_of_one_size_the_recent_ones_count(self) -> None:
        footprints = footprints_of((100, 999), *[(100, 10)] * (_MAX_RECENT - 1))
        assert footprints.estimate("f", 100) == 999
        footprints.note("f", 100, 11)
        assert footprints.estimate("f", 100) == 11
        assert footprints.estimate("g", 100) is None

    @given(
        st.integers(0, 10**6), st.integers(0, 100), st.lists(st.integers(0, 10**9), min_size=1), st.integers(0, 10**9)
    )
    def test_is_enough_where_the_need_is_fixed_plus_proportional(
        self, fixed: int, factor: int, seen: list[int], argument_bytes: int
    ) -> None:
        def need(n_bytes: int) -> int:
            return fixed + factor * n_bytes

        footprints = footprints_of(*((n, need(n)) for n in seen if n))
        estimate = footprints.estimate("f", argument_bytes)
        assert estimate is None or estimate >= need(argument_bytes)

    def test_bounds(self) -> None:
        footprints = Footprints()
        for i in range(_MAX_FUNCTIONS + 10):
            footprints.note(f"f{i}", 1, i)
            footprints.note("often", 1, i)
        assert len(footprints) == _MAX_FUNCTIONS
        assert "f0" not in footprints
        assert "often" in footprints
        for size in range(3 * _MAX_SIZES):
            for _ in range(2 * _MAX_RECENT):
                footprints.note("often", 2**size, 1)
        assert len(footprints.snapshot()["often"]) == _MAX_SIZES * _MAX_RECENT

    def test_from_many_threads(self) -> None:
        footprints = Footprints()
        together = threading.Barrier(4)

        def work(name: str) -> None:
            together.wait(30)
            for i in range(200):
                footprints.note(name, i, i)
                footprints.note("shared", i, i)
                assert (footprints.estimate("shared", i) or 0) >= 0
                footprints.snapshot()

        threads = [threading.Thread(target=work, args=(f"f{i}",)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert set(footprints.snapshot()) == {"shared", "f0", "f1", "f2", "f3"}


class Callable_:
    def __call__(self) -> None: ...

    def method(self) -> None: ...


@gpu_task(priority=1)
def task() -> None: ...


class TestName:
    def test_variants_share_it(self) -> None:
        name = f"{__name__}.task"
        assert function_name(task) == name
        assert function_name(task.options(priority=3)) == name
        assert function_name(functools.partial(functools.partial(task), 1)) == name
        assert function_name(functools.lru_cache(task)) == name

    def test_other_callables(self) -> None:
        assert function_name(Callable_()) == function_name(Callable_) == f"{__name__}.Callable_"
        assert function_name(Callable_().method) == f"{__name__}.Callable_.method"
        assert function_name(abs) == "builtins.abs"
        assert function_name(torch.nn.ReLU()) == "torch.nn.modules.activation.ReLU"
        assert function_name(torch.linalg.solve).endswith("linalg_solve")


class TestFile:
    def test_round_trip(self, tmp_path: Path) -> None:
        footprints = footprints_of((1, 2), (300, 4), (300, 5))
        footprints.note("größer", 0, 2**40)
        path = tmp_path / "footprints.json"
        path.write_text("what was there before")
        footprints.save(path)
        other = Footprints()
        other.load(str(path))
        assert other.snapshot() == footprints.snapshot()
        assert isinstance(other.snapshot(), MappingProxyType)
        assert other.snapshot()["f"][0] == (1, 2)
        assert [entry.name for entry in tmp_path.iterdir()] == ["footprints.json"]

    def test_loading_adds(self, tmp_path: Path) -> None:
        footprints_of((1, 20)).save(tmp_path / "file")
        footprints = footprints_of((1, 10), (300, 3))
        footprints.note("g", 1, 1)
        footprints.load(tmp_path / "file")
        assert footprints.estimate("f", 1) == 20
        assert footprints.estimate("f", 300) == 3
        assert footprints.estimate("g", 1) == 1
        footprints.clear()
        assert not footprints.snapshot()

    def test_failed_save_leaves_the_old_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "file"
        footprints_of((1, 2)).save(path)
        before = path.read_bytes()

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            footprints_of((3, 4)).save(path)
        assert path.read_bytes() == before
        assert list(tmp_path.iterdir()) == [path]

    def test_folder_or_file_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError):
            Footprints().save(tmp_path / "no" / "file")
        with pytest.raises(FileNotFoundError):
            Footprints().load(tmp_path / "file")

    GOOD = {"format": "managed_exec footprints", "version": 1, "functions": {"f": [[1, 2]]}}  # noqa: RUF012 never changed

    @pytest.mark.parametrize(
        ("content", "expected"),
        [
            (b"", "expected JSON, got JSONDecodeError"),
            (b"\xff\xfe", "expected JSON, got UnicodeDecodeError"),
            (b"[" * 100_000, "expected JSON, got RecursionError"),
            ([], r"expected an object with 'format': 'managed_exec footprints', got \[\]"),
            ({**GOOD, "format": "x"}, "expected an object with 'format'"),
            ({**GOOD, "version": 2}, "expected version 1, got version 2"),
            ({**GOOD, "functions": []}, "expected 'functions' by name"),
            ({**GOOD, "functions": {"f": 1}}, "expected of 'f' pairs of bytes, .* got 1"),
            ({**GOOD, "functions": {"f": [[1, 2], [1]]}}, r"got \[1\]"),
            ({**GOOD, "functions": {"f": [[1, -2]]}}, r"got \[1, -2\]"),
            ({**GOOD, "functions": {"f": [[1, True]]}}, r"got \[1, True\]"),
            ({**GOOD, "functions": {"f": [[1.5, 2]]}}, r"got \[1.5, 2\]"),
        ],
        ids=lambda value: str(value)[:40] if isinstance(value, str) else "",
    )
    def test_wrong_file(self, tmp_path: Path, content: object, expected: str) -> None:
        path = tmp_path / "file"
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        footprints = footprints_of((5, 6))
        with pytest.raises(ValueError, match=f"file': .*{expected}.*; give a file that save"):
            footprints.load(path)
        assert dict(footprints.snapshot()) == {"f": ((5, 6),)}, "nothing was changed"
