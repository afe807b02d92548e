"""What a broker suspects of having ended the process of an owner."""

from __future__ import annotations

import pytest

from keylane.broker.partition.suspects import BEGUN_MAX, Suspects
from keylane.protocol.offsets import AckedOffsets


def ended(*pulled_to: int) -> Suspects:
    """Owners have pulled so far, and ended without a release."""
    suspects = Suspects()
    for upto in pulled_to:
        suspects.record_pull(upto)
        assert not suspects.on_new_owner(is_released=False)
    return suspects


def test_pulled_messages_are_suspects_when_two_owners_ended_without_a_release():
    """A first end accuses no message: but for its caution with what is redriven, the next owner
    goes on as any.
    """
    suspects = ended(20)
    assert suspects.upto == 0
    suspects.record_pull(30)
    suspects.record_pull(10)
    assert suspects.upto == 0, "while it lives"
    suspects.on_new_owner(is_released=False)
    assert suspects.upto == 20


def test_suspects_are_what_both_owners_had():
    """What only one of them pulled is suspected once the other has ended with it, too."""
    suspects = ended(20, 5)
    assert suspects.upto == 5
    suspects.record_pull(30)
    suspects.on_new_owner(is_released=False)
    assert suspects.upto == 20


def test_suspects_stay_when_the_next_owner_ends_before_it_has_pulled_them_all():
    assert ended(20, 20, 5, 0).upto == 20


def test_end_without_a_release_is_known_where_nothing_was_pulled():
    """What is redriven there may have ended the process; a broker that started since knows nothing
    of it.
    """
    suspects = Suspects()
    assert not suspects.on_new_owner(is_released=False)
    assert not suspects.unreleased, "of its first owner in this broker's life nothing is known"
    suspects.on_new_owner(is_released=False)
    assert (suspects.unreleased, suspects.upto) == (True, 0)
    suspects.on_new_owner(is_released=True)
    assert not suspects.unreleased
    suspects.on_new_owner(is_released=False)
    assert suspects.unreleased


@pytest.mark.parametrize("begun", [[], [(3, 1)]])
def test_release_ends_every_suspicion(begun: list[tuple[int, int]]):
    """Also that of the owners before."""
    suspects = ended(20, 20)
    suspects.begun = dict(begun)
    assert suspects.on_new_owner(is_released=True) is bool(begun)
    assert (suspects.upto, suspects.unacked(AckedOffsets())) == (0, [])
    suspects.record_pull(20)
    suspects.on_new_owner(is_released=False)
    assert suspects.upto == 0, "the next end is a first one"


def test_begun_message_is_no_suspect_when_it_is_acked_or_has_failed():
    suspects = Suspects()
    acked = AckedOffsets(0, [(4, 5)])
    suspects.begin([(3, 1), (4, 1), (7, 2)], acked)
    assert suspects.unacked(acked) == [(3, 1), (7, 2)]
    suspects.remove_failed([3, 99])
    assert suspects.unacked(acked) == [(7, 2)]


def test_lowest_begun_messages_are_kept():
    suspects = Suspects()
    suspects.begin([(offset, 1) for offset in range(BEGUN_MAX + 5, 0, -1)], AckedOffsets())
    assert sorted(suspects.begun) == list(range(1, BEGUN_MAX + 1))


def test_ends_of_sessions_are_counted_up_to_a_limit():
    suspects, acked = Suspects(), AckedOffsets(3)
    assert not suspects.on_session_expired([], acked)
    assert suspects.on_session_expired([(2, 5), (7, 8)], acked)
    assert (suspects.begun, suspects.isolated) == ({3: 1, 4: 1, 7: 1}, [])
    suspects.on_session_expired([(4, 5 + BEGUN_MAX)], acked)
    assert suspects.isolated == [4, 7]
    assert len(suspects.begun) == BEGUN_MAX
