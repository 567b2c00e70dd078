"""Amounts of memory as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from managed_exec.sizes import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("size", "n_bytes"),
    [
        (1, 1),
        (12_000_000, 12_000_000),
        ("1", 1),
        ("512", 512),
        ("7B", 7),
        ("2kB", 2_000),
        ("2KB", 2_000),
        ("500 MB", 500_000_000),
        ("3GB", 3 * 10**9),
        ("1TB", 10**12),
        ("1KiB", 1024),
        ("64MiB", 64 * 2**20),
        ("12GiB", 12 * 2**30),
        ("12gib", 12 * 2**30),
        ("1.5 GiB", 3 * 2**29),
        ("0.5KiB", 512),
        ("1TiB", 2**40),
        ("  4   MiB ", 4 * 2**20),
        ("1.9B", 1),
    ],
)
def test_parse(size: int | str, n_bytes: int) -> None:
    assert parse_bytes(size) == n_bytes


@pytest.mark.parametrize(
    "size", ["", " ", "GiB", "1 GiB 2", "-1GiB", "+1", "1e3", "1,000", "12 GB/s", "1XB", "1G", "1 Ki B", "½GiB", "nan"]
)
def test_unreadable_text(size: str) -> None:
    with pytest.raises(ValueError, match=r"limit: cannot read .*; write a number and one of B, KB, .* TiB"):
        parse_bytes(size, name="limit")


@pytest.mark.parametrize("size", [0, -1, "0", "0.0GiB", "0.4B"])
def test_not_positive(size: int | str) -> None:
    with pytest.raises(ValueError, match="limit: expected a positive amount, got"):
        parse_bytes(size, name="limit")


@pytest.mark.parametrize("size", [None, 1.5, True, False, b"1GiB", [1], 1j])
def test_wrong_type(size: object) -> None:
    with pytest.raises(TypeError, match="limit: expected bytes as an int or text like '12GiB', got"):
        parse_bytes(size, name="limit")  # type: ignore[arg-type]


def test_name_in_errors_has_a_default() -> None:
    with pytest.raises(ValueError, match=r"^size: "):
        parse_bytes("much")


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (64 * 2**20, "64.0 MiB"),
        (3 * 2**29, "1.5 GiB"),
        (2**40, "1.0 TiB"),
        (2**50, "1024.0 TiB"),
        (-1536, "-1.5 KiB"),
    ],
)
def test_format(n_bytes: int, text: str) -> None:
    assert format_bytes(n_bytes) == text


@given(st.integers(1, 2**50))
def test_what_is_printed_can_be_read_back(n_bytes: int) -> None:
    assert parse_bytes(format_bytes(n_bytes)) == pytest.approx(n_bytes, rel=0.05)


@given(st.integers(1, 2**50))
def test_a_number_means_itself_as_text_too(n_bytes: int) -> None:
    assert parse_bytes(n_bytes) == parse_bytes(str(n_bytes)) == parse_bytes(f"{n_bytes} B") == n_bytes
