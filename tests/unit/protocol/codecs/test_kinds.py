"""A JsonCodec encodes values of its own type, and refuses others."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, NewType, Protocol, TypedDict, TypeVar

import msgspec
import pytest

from keylane.protocol.codecs.codec import encode_value
from keylane.protocol.codecs.text import JsonCodec, classes_of
from keylane.protocol.errors import CodecError

T = TypeVar("T")


class Bought(msgspec.Struct, tag=True):
    id: int


class Returned(msgspec.Struct, tag=True):
    id: int


@dataclass
class Shipped:
    id: int


class Priced(TypedDict):
    price: float


class Boxed(msgspec.Struct, Generic[T]):
    content: T


class Sized(Protocol):
    size: int


OrderId = NewType("OrderId", int)


@pytest.mark.parametrize(
    ("kind", "value", "other"),
    [
        (Bought, Bought(1), Returned(1)),
        (Bought, Bought(1), {"id": 1}),
        (Shipped, Shipped(1), Bought(1)),
        (Bought | Returned, Returned(1), Shipped(1)),
        (Bought | None, None, Returned(1)),
        (Boxed[int], Boxed(1), Bought(1)),
        (Annotated[int, msgspec.Meta(ge=0)], 1, "1"),
        (Literal["paid", 1], "paid", 1.5),
        (list[int], [1], (1,)),
        (Sequence[int], [1], {1}),
        (Priced, {"price": 1.0}, Bought(1)),
        (OrderId, 1, "1"),
        (float, 1, "1"),
        (float, 1.5, True),
        (int, 1, True),
        (bool, True, 1),
        (str, "text", b"text"),
    ],
)
def test_value_of_another_type_is_refused(kind: Any, value: Any, other: Any):
    codec: JsonCodec[Any] = JsonCodec(kind)
    assert encode_value(codec, value, subject="s") == msgspec.json.encode(value)
    with pytest.raises(CodecError, match="is no") as refused:
        encode_value(codec, other, subject="s")
    assert isinstance(refused.value.__cause__, TypeError)


@pytest.mark.parametrize("kind", [Any, object, Any | None])
def test_every_value_is_encoded_when_the_type_is_any(kind: Any):
    codec: JsonCodec[Any] = JsonCodec() if kind is Any else JsonCodec(kind)
    for value in (1, True, "text", Bought(1), None):
        assert encode_value(codec, value, subject="s") == msgspec.json.encode(value)


def test_classes_are_not_known_of_a_protocol():
    assert classes_of(Sized) is None
    assert classes_of(T) is None


@pytest.mark.parametrize("way", [lambda codec: pickle.loads(pickle.dumps(codec)), copy.deepcopy])
@pytest.mark.parametrize(
    ("codec", "value"), [(JsonCodec(), {"a": 1}), (JsonCodec(Shipped), Shipped(3))]
)
def test_json_codec_works_when_it_was_pickled_or_copied(way, codec, value):
    """A pickled message has its codec with it, which raised "cannot pickle 'msgspec.json.Encoder'
    object".
    """
    carried = way(codec)
    assert carried.decode(carried.encode(value)) == value
    if value == Shipped(3):
        with pytest.raises(TypeError):
            carried.encode({"id": 3})
