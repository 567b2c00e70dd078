"""What CUDA_VISIBLE_DEVICES shows, over cards that are given."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from managed_exec.devices.visibility import Card, Instance, visibility

UUIDS = ["GPU-aaaa1111", "GPU-aabb2222", "GPU-cccc3333"]
CARDS = [Card(number, uuid) for number, uuid in enumerate(UUIDS)]

# The second is in MIG mode, with two instances that share their memory and one of its own; the third has none yet.
INSTANCES = (Instance("MIG-dddd4444", 1, 0), Instance("MIG-dddd5555", 1, 1), Instance("MIG-eeee6666", 5, 0))
MIG_CARDS = [
    CARDS[0],
    Card(1, UUIDS[1], is_mig=True, instances=INSTANCES),
    Card(2, UUIDS[2], is_mig=True),
]


@pytest.mark.parametrize(
    ("value", "cards"),
    [
        (None, [0, 1, 2]),
        ("0", [0]),
        ("2,0", [2, 0]),
        ("0,1,2", [0, 1, 2]),
        (" 2 , 1 ", [2, 1]),
        ("GPU-aaaa1111", [0]),
        ("GPU-cccc3333,GPU-aaaa1111", [2, 0]),
        ("GPU-c,GPU-aab", [2, 1]),
        ("GPU-c,0", [2, 0]),
        # Numbers are read as C reads them.
        ("1gpu,+2", [1, 2]),
        ("00,02x", [0, 2]),
        # No device at all.
        ("", []),
        (" ", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("none", []),
        ("\N{ARABIC-INDIC DIGIT ONE}", []),
        # A prefix of two cards, of none, and names without their GPU- are invalid.
        ("GPU-aa", []),
        ("GPU-", []),
        ("GPU-ffff", []),
        ("aaaa1111", []),
        ("gpu-cccc3333", []),
        ("MIG-dddd4444", []),
        ("MIG-GPU-aaaa1111/1/0", []),
        # Cut off at the first that is invalid.
        ("1,-1,2", [1]),
        ("0,3,1", [0]),
        ("2,,0", [2]),
        ("0,", [0]),
        ("1,GPU-aa,2", [1]),
        ("0,one,2", [0]),
        ("0,MIG-dddd4444", [0]),
        # A card named twice leaves none, whatever it is called.
        ("1,1", []),
        ("0,1,0", []),
        ("0,GPU-aaaa", []),
        ("1,1,9", []),
        # But not one named again behind the cut.
        ("1,9,1", [1]),
    ],
)
def test_cards(value: str | None, cards: list[int]) -> None:
    assert visibility(CARDS, value).uuids == tuple(UUIDS[card] for card in cards)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        # One instance, and nothing beside it.
        (None, "MIG-dddd4444"),
        ("0,1", "MIG-dddd4444"),
        ("1", "MIG-dddd4444"),
        ("GPU-aabb", "MIG-dddd4444"),
        ("MIG-dddd5555", "MIG-dddd5555"),
        ("MIG-e", "MIG-eeee6666"),
        ("MIG-eeee6666,MIG-dddd4444", "MIG-eeee6666"),
        ("0,MIG-dddd5555", "MIG-dddd5555"),
        ("MIG-GPU-aabb2222/1/1", "MIG-dddd5555"),
        ("MIG-GPU-aabb2222/5/0,0", "MIG-eeee6666"),
        ("MIG-dddd4444,MIG-ffff", "MIG-dddd4444"),
        # Cards that are not in MIG mode are as ever.
        ("0", "GPU-aaaa1111"),
        ("0,2", "GPU-aaaa1111"),
        ("GPU-aaaa", "GPU-aaaa1111"),
        # Nothing: no instance, one that is not there, two that are meant, one that is named twice.
        ("2", None),
        ("GPU-c", None),
        ("MIG-d", None),
        ("MIG-", None),
        ("MIG-GPU-aabb2222/2/0", None),
        ("MIG-GPU-aaaa1111/1/0", None),
        ("MIG-GPU-aabb2222/1", None),
        ("MIG-dddd4444,MIG-GPU-aabb2222/1/0", None),
        ("1,MIG-dddd4444", None),
        ("mig-dddd4444", None),
    ],
)
def test_instances(value: str | None, shown: str | None) -> None:
    assert visibility(MIG_CARDS, value).uuids == (() if shown is None else (shown,))


@pytest.mark.parametrize(("value", "shown"), [(None, ["0", "2"]), ("2,0", ["2", "0"]), ("0,1,2", ["0"]), ("1", [])])
def test_a_lost_card_keeps_its_number(value: str | None, shown: list[str]) -> None:
    cards = [CARDS[0], Card(1, None, problem="GPU is lost"), CARDS[2]]
    assert visibility(cards, value).uuids == tuple(UUIDS[int(number)] for number in shown)


class TestWhyHidden:
    def test_what_is_shown_is_not(self) -> None:
        assert [visibility(CARDS, "0,2").why_hidden(UUIDS[i]) is None for i in range(3)] == [True, False, True]
        assert visibility(CARDS, None).why_hidden(UUIDS[1]) is None

    @pytest.mark.parametrize(
        ("value", "reason"),
        [
            ("0", "hidden by CUDA_VISIBLE_DEVICES='0'"),
            ("0,-1,1", "hidden by CUDA_VISIBLE_DEVICES='0,-1,1'; its entry '-1' names no device and ends the list"),
            ("", "hidden by CUDA_VISIBLE_DEVICES=''"),
            ("0,0", "CUDA_VISIBLE_DEVICES='0,0' names a device twice, for which CUDA shows none"),
            ("1,1", "CUDA_VISIBLE_DEVICES='1,1' names a device twice, for which CUDA shows none"),
        ],
    )
    def test_card(self, value: str, reason: str) -> None:
        assert visibility(CARDS, value).why_hidden(UUIDS[1]) == reason

    @pytest.mark.parametrize("value", [None, "0,1", "1,0"])
    def test_beside_an_instance(self, value: str | None) -> None:
        reason = "CUDA shows a process one MIG instance, and nothing beside it"
        assert visibility(MIG_CARDS, value).why_hidden(UUIDS[0]) == reason

    def test_instance(self) -> None:
        assert visibility(MIG_CARDS, "MIG-e").why_hidden("MIG-dddd4444") == "hidden by CUDA_VISIBLE_DEVICES='MIG-e'"


ENTRIES = st.sampled_from(
    [*map(str, range(-1, 4)), "GPU-a", "GPU-aa", *UUIDS, "MIG-d", "MIG-GPU-aabb2222/5/0", "", "x"]
)


@given(st.lists(ENTRIES | st.text(max_size=8)), st.sampled_from([CARDS, MIG_CARDS]))
def test_whatever_the_value(entries: list[str], cards: list[Card]) -> None:
    """No value fails, nothing is shown twice, only what there is, and one instance at most, alone."""
    seen = visibility(cards, ",".join(entries))
    everything = {*UUIDS, *(instance.uuid for card in cards for instance in card.instances)}
    assert len(set(seen.uuids)) == len(seen.uuids)
    assert set(seen.uuids) <= everything
    assert len(seen.uuids) == 1 or not any(uuid.startswith("MIG-") for uuid in seen.uuids)
    assert all((seen.why_hidden(uuid) is None) == (uuid in seen.uuids) for uuid in everything)
