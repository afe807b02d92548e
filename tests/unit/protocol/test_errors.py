"""Errors say what they know, survive pickling and both wires, and never break on their own
details.
"""

from __future__ import annotations

import copy
import pickle
from functools import partial

import msgspec
import pytest

from keylane.protocol import errors
from keylane.protocol.control import ErrorBody
from keylane.protocol.errors import (
    HINT_CHARS_MAX,
    TEXT_CHARS_MAX,
    ConflictError,
    DeliveryError,
    Fate,
    FencedError,
    FlushFailedError,
    GroupUnknownError,
    InvalidRequestError,
    KeylaneError,
    NotSentError,
    OutcomeUnknownError,
    Reason,
    RetryRule,
    StaleRouteError,
    SubjectDeletedError,
    SubjectUnknownError,
    UsageError,
    error_from_wire,
)
from keylane.protocol.frames import (
    Refused,
    decode_answer,
    encode_frame,
    refusal,
    refusal_error,
)
from keylane.protocol.http.bodies import encode_json
from keylane.protocol.limits import FRAME_BYTES_MAX

KINDS = [getattr(errors, name) for name in errors.__all__ if name.endswith("Error")]
MADE = [
    *(partial(kind) for kind in KINDS if "code" in vars(kind)),
    *(partial(getattr(errors, reason.kind), reason) for reason in Reason),
]
"""What makes an error of each code."""


def over_the_data_plane(error: KeylaneError) -> KeylaneError:
    number, answer, payload = decode_answer(encode_frame(9, refusal(error)))
    assert isinstance(answer, Refused)
    assert number == 9
    assert not payload
    return refusal_error(answer)


def over_the_control_plane(error: KeylaneError) -> KeylaneError:
    return msgspec.json.decode(encode_json(ErrorBody.of(error)), type=ErrorBody).error()


def through_pickle(error: KeylaneError) -> KeylaneError:
    return pickle.loads(pickle.dumps(error))


WAYS = [over_the_data_plane, over_the_control_plane, through_pickle]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("make", MADE, ids=lambda make: str(make().code))
def test_every_error_survives_every_way(make, way):
    """Class, reason, code, text, details and fate of an error are the same on the other side."""
    sent = make(partition_id=7, address="127.0.0.1:1", message="about", self=2, kind=3, code=4)
    got = way(sent)
    assert type(got) is type(sent)
    assert got.reason is sent.reason
    assert got.code == sent.code
    assert got.message == sent.message
    assert got.details == sent.details
    assert got.fate is sent.fate
    assert got.retry is sent.retry
    assert str(got) == str(sent)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_fate_of_one_error_goes_before_that_of_its_class(way):
    """An error whose fate its sender knows better than its class arrives with that fate."""
    sent = StaleRouteError("sealed in mid-append")
    sent.fate = errors.Fate.UNKNOWN
    assert way(sent).fate is errors.Fate.UNKNOWN
    assert StaleRouteError("another").fate is errors.Fate.NOT_DONE


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_hint_of_one_error_goes_before_that_of_its_class(way):
    """An error whose sender gives advice of its own arrives with it; another of its class has that
    of the class.
    """
    sent = FencedError("a reset is under way")
    sent.hint = "It goes on by itself."
    assert way(sent).hint == "It goes on by itself."
    assert way(FencedError("another")).hint == FencedError.hint


@pytest.mark.parametrize("way", WAYS[:2], ids=lambda way: way.__name__)
def test_hint_is_cut_when_it_is_longer_than_a_hint_may_be(way):
    """A hint stays short, and decodable, whatever it quotes."""
    sent = FencedError("no")
    sent.hint = "é" * 10_000 + "\udcff"
    assert way(sent).hint == "é" * HINT_CHARS_MAX
    assert max(len(make().hint) for make in MADE) <= HINT_CHARS_MAX


def test_hint_is_that_of_the_class_when_a_peer_sends_none_or_a_longer_one_is_cut():
    """Peers of earlier versions send no hint in a frame; a foreign one may send any."""
    old = msgspec.msgpack.encode([127, 1130, "no", {}, "not_done"])
    assert refusal_error(msgspec.msgpack.decode(old, type=Refused)).hint == FencedError.hint
    long = Refused(1130, "no", {}, "not_done", "x" * 10_000)
    assert refusal_error(long).hint == "x" * HINT_CHARS_MAX
    body = msgspec.json.decode(
        b'{"code": 1130, "name": "FencedError", "message": "no"}', type=ErrorBody
    )
    assert body.error().hint == FencedError.hint


def test_refusal_with_a_hint_is_read_when_the_client_is_of_an_earlier_version():
    """The hint is the last field of the frame: a client that does not know it reads the fields
    before it.
    """

    class EarlierRefused(msgspec.Struct, frozen=True, array_like=True, tag=127):
        code: int
        message: str
        details: dict[str, object]
        fate: str = "not_done"

    sent = FencedError("no", token=5)
    sent.hint = "an own one"
    got = msgspec.msgpack.decode(msgspec.msgpack.encode(refusal(sent)), type=EarlierRefused)
    assert got == EarlierRefused(1130, "no", {"token": 5}, "not_done")


def test_fate_of_a_newer_protocol_is_unknown():
    """A fate that this version does not know is not taken for "nothing was done"."""
    assert refusal_error(Refused(1120, "sealed", {}, "perhaps")).fate is errors.Fate.UNKNOWN


def test_unknown_code_is_a_plain_refusal():
    """A code of a newer peer becomes a RefusedError that is not retried."""
    error = error_from_wire(1999, "something new", {"depth": 3})
    assert type(error) is errors.RefusedError
    assert (error.message, error.details) == ("something new", {"depth": 3})
    assert error.retry is RetryRule.NEVER


@pytest.mark.parametrize("way", WAYS[:2], ids=lambda way: way.__name__)
@pytest.mark.parametrize(
    ("value", "arrives"),
    [
        (2**63, 2**63),
        (2**64, str(2**64)),
        (-(2**63) - 1, str(-(2**63) - 1)),
        (True, True),
        (0.5, 0.5),
        (None, "None"),
        (b"\xff", "b'\\xff'"),
        (["a", 1], "['a', 1]"),
        ("\ud800", "?"),
        (errors.Fate.UNKNOWN, "unknown"),
        ("x" * 10_000, "x" * TEXT_CHARS_MAX),
    ],
    ids=lambda value: f"{type(value).__name__}-{value!r:.12}",
)
def test_details_of_any_kind_cross_the_wire(way, value, arrives):
    """No detail keeps an error from being told: numbers stay numbers, the rest becomes text."""
    assert way(FencedError("no", value=value)).details == {"value": arrives}


@pytest.mark.parametrize("way", WAYS[:2], ids=lambda way: way.__name__)
def test_error_that_quotes_a_huge_input_is_cut(way):
    """An error stays small enough to be sent, whatever it quotes."""
    error = way(InvalidRequestError("é" * FRAME_BYTES_MAX + "\udcff"))
    assert error.message == "é" * TEXT_CHARS_MAX


def test_text_of_an_error_names_its_class_code_and_advice():
    """What a person reads has the summary, the details, the class, the code and the hint."""
    assert str(FencedError(partition_id=7, token=5)) == (
        "a newer owner has this partition (partition_id=7, token=5) [FencedError 1130]\n"
        "  Stop handling it: the newer owner has everything that was not acked."
    )
    assert str(FencedError("an own text", token=5)).startswith("an own text [FencedError 1130]")


def test_advice_about_a_deleted_subject_is_right_for_every_fate():
    """Producers raise it with an unknown fate too: the message may have been stored before the
    deletion.
    """
    error = SubjectDeletedError(subject="orders").copy(Fate.UNKNOWN)
    assert "Nothing was done" not in str(error)


def test_two_errors_cannot_share_a_code():
    """A class that takes a code already given does not come into being; a reason has a code of its
    own too.
    """
    with pytest.raises(AssertionError, match="code 1130 is both"):
        type("OtherError", (errors.RefusedError,), {"code": 1130})
    assert len({make().code for make in MADE}) == len(MADE) == len(errors.codes())


def test_class_without_a_code_has_reasons():
    """It is raised with one of them; its own code is that of its base."""
    codeless = {kind.__name__ for kind in KINDS if "code" not in vars(kind)}
    assert codeless <= {reason.kind for reason in Reason} <= {kind.__name__ for kind in KINDS}


def test_reason_gives_an_error_its_code_text_hint_and_fate():
    error = DeliveryError(Reason.PARTLY_QUEUED, queued=3)
    assert (error.code, error.queued, error.fate) == (1186, 3, Fate.NOT_DONE)
    assert str(error) == (
        f"{Reason.PARTLY_QUEUED.summary} (queued=3) [DeliveryError 1186 PARTLY_QUEUED]\n"
        f"  {Reason.PARTLY_QUEUED.hint}"
    )
    assert Reason(1186) is Reason.PARTLY_QUEUED
    assert DeliveryError("given up").reason is None


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_copy_with_another_text_keeps_the_rest(way):
    sent = DeliveryError(Reason.PARTLY_QUEUED, "one", queued=3).copy(message="two")
    sent.hint = "Look there."
    got = way(sent)
    assert (got.message, got.reason, got.details, got.hint) == (
        *("two", Reason.PARTLY_QUEUED, {"queued": 3}),
        "Look there.",
    )


def test_fates_of_the_unreachable():
    """A call that was never sent was not done; one that lost its answer may have been."""
    assert NotSentError().fate is errors.Fate.NOT_DONE
    assert OutcomeUnknownError().fate is errors.Fate.UNKNOWN
    assert FlushFailedError().fate is errors.Fate.UNKNOWN


def test_every_error_says_what_it_is():
    """Each code has a summary of its own, and star imports offer every class."""
    assert len({make().summary for make in MADE}) >= len(MADE) - 2
    assert {kind.__name__ for kind in KINDS} | {"Fate", "Reason", "RetryRule"} == set(
        errors.__all__
    )
    assert len(errors.__all__) == len(set(errors.__all__))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_error_explains_itself(kind):
    """`help` of an error says when it is raised, in a docstring of its own."""
    assert kind.__doc__
    assert kind.__doc__ not in {other.__doc__ for other in KINDS if other is not kind}
    assert ("hint" in vars(kind)) is ("code" in vars(kind))


def test_every_code_has_advice():
    assert [make().code for make in MADE if not make().hint] == [KeylaneError.code]


def test_error_of_a_silent_broker_group_names_what_shows_it():
    """Its address is not known, so the hint of others, about an address, does not help."""
    error = NotSentError.of_group("g1", 3)
    assert error.details == {"broker_group": "g1", "partition_id": 3}
    assert "keylane broker list" in str(error)
    assert "address" not in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


class StockError(KeylaneError):
    """A program's own error, which its code that catches a KeylaneError handles too."""


class ShopNotSentError(NotSentError):
    """A program's own kind of an error that has a code."""


@pytest.mark.parametrize("kind", [StockError, ShopNotSentError])
def test_error_of_a_program_has_the_code_of_its_base(kind):
    """Its class statement raised an AssertionError; what servers send is still made into the
    base.
    """
    error = kind("none left", item=3)
    assert error.code == kind.__base__.code
    assert errors.error_class_of(error.code) is kind.__base__
    assert type(through_pickle(error)) is kind
    assert str(through_pickle(error)) == str(error)
    assert type(over_the_control_plane(error)) is kind.__base__


@pytest.mark.parametrize("way", [through_pickle, copy.copy, copy.deepcopy])
def test_error_keeps_its_notes_and_what_a_program_has_set(way):
    """As the errors of Python do, where a pool of processes or a task queue carries them."""
    error = NotSentError("no way", address="a:1")
    error.add_note("order 7")
    error.seen_by = "till-3"
    carried = way(error)
    assert carried.__notes__ == ["order 7"]
    assert carried.seen_by == "till-3"
    assert (str(carried), carried.details, carried.fate) == (str(error), error.details, error.fate)


@pytest.mark.parametrize(
    ("subject", "command"),
    [
        ("orders", "keylane subject create orders creates one"),
        ("a b; c", "keylane subject create NAME creates one"),
    ],
)
def test_hint_names_the_subject_when_it_is_a_name(subject, command):
    """A command of a hint is copied into a shell."""
    assert command in SubjectUnknownError(subject=subject).hint
    assert "subject create NAME" in SubjectUnknownError("no detail").hint
    assert "create SUBJECT NAME" in GroupUnknownError(subject=subject, group="g").hint


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        ({"subject": "orders", "group": "billing"}, "orders billing"),
        ({"subject": "orders"}, "SUBJECT GROUP"),
        ({"subject": "orders", "group": "a; b"}, "SUBJECT GROUP"),
        ({}, "SUBJECT GROUP"),
    ],
)
@pytest.mark.parametrize(
    ("kind", "reason", "command"),
    [
        (UsageError, Reason.SEEK_IN_GROUP, "keylane group reset {} --to"),
        (ConflictError, Reason.GROUP_STRATEGY, "keylane group switch {} STRATEGY"),
    ],
)
def test_hint_names_the_subject_and_the_group_when_both_are_names(
    kind, reason, command, names, shown
):
    assert command.format(shown) in kind(reason, "no", **names).hint
