"""Codecs: bytes of values and values of bytes, and the error that tells of each failure."""

from __future__ import annotations

import datetime as dt
import pickle
import subprocess
import sys
from collections import deque
from dataclasses import dataclass
from typing import Any

import msgspec
import pydantic
import pytest

from keylane import CodecError, Fate, Message
from keylane.errors import ConfigError
from keylane.protocol.codecs.codec import Codec, check_codec, decode_value, encode_value
from keylane.protocol.codecs.models import PydanticCodec
from keylane.protocol.codecs.text import JsonCodec, TextCodec


@dataclass
class Paid:
    order: int
    at: dt.date


class Struct(msgspec.Struct):
    name: str
    parts: list[int]


class Order(pydantic.BaseModel):
    number: int = pydantic.Field(alias="orderNumber")
    note: str = ""

    @pydantic.computed_field
    @property
    def even(self) -> bool:
        return self.number % 2 == 0


class Refund(Order):
    pass


class Secret(pydantic.BaseModel):
    token: pydantic.SecretStr
    nested: list[dict[str, pydantic.SecretBytes]] = []
    named: dict[pydantic.SecretStr, int] = {}
    queued: deque[pydantic.SecretStr] = deque()


class Shown(pydantic.BaseModel):
    token: pydantic.SecretStr
    _used: int = pydantic.PrivateAttr(default=0)

    @pydantic.field_serializer("token", when_used="json")
    def show(self, token: pydantic.SecretStr) -> str:
        return token.get_secret_value()


class Excluded(pydantic.BaseModel):
    needed: int = pydantic.Field(exclude=True)


class Cached(pydantic.BaseModel):
    number: int
    cache: dict[str, int] = pydantic.Field(default={}, exclude=True)


class TwoNames(pydantic.BaseModel):
    number: int = pydantic.Field(validation_alias="in", serialization_alias="out")


class Cents(pydantic.BaseModel):
    amount: int

    @pydantic.field_serializer("amount")
    def in_euros(self, amount: int) -> str:
        return f"{amount / 100} EUR"


class OrderHolder(pydantic.BaseModel):
    order: Order


class Larger(Order):
    more: int = 1


class LargerStruct(Struct):
    more: int = 1


class Tenfold:
    """A codec of a program's own: whole numbers, times ten."""

    name = "tenfold"

    def encode(self, value: int, /) -> bytes:
        return b"%d" % (value * 10)

    def decode(self, data: bytes, /) -> int:
        return int(data) // 10


class Faulty:
    name = "faulty"

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def encode(self, value: Any, /) -> Any:
        if isinstance(self._answer, BaseException):
            raise self._answer
        return self._answer

    decode = encode


@pytest.mark.parametrize(
    ("codec", "value", "data"),
    [
        (TextCodec(), "grüße", "grüße".encode()),
        (JsonCodec(), {"a": [1, None, "b"]}, b'{"a":[1,null,"b"]}'),
        (JsonCodec(Paid), Paid(7, dt.date(2024, 5, 1)), b'{"order":7,"at":"2024-05-01"}'),
        (JsonCodec(Struct), Struct("n", [1, 2]), b'{"name":"n","parts":[1,2]}'),
        (JsonCodec(list[int]), [1, 2], b"[1,2]"),
        (PydanticCodec(Order), Order(orderNumber=4), b'{"orderNumber":4,"note":""}'),
        (Tenfold(), 12, b"120"),
    ],
    ids=["text", "json", "dataclass", "struct", "list", "pydantic", "own"],
)
def test_value_comes_back_from_its_bytes(codec: Codec[Any], value: Any, data: bytes):
    check_codec(codec)
    assert encode_value(codec, value, subject="s") == data
    decoded = decode_value(codec, data, subject="s", partition_id=1, offset=2)
    assert (decoded, type(decoded)) == (value, type(value))


@pytest.mark.parametrize(
    ("codec", "value", "why"),
    [
        (TextCodec(), b"bytes", "bytes is not a str"),
        (TextCodec(), "\ud800", "UnicodeEncodeError"),
        (JsonCodec(), object(), "TypeError"),
        (PydanticCodec(Order), {"orderNumber": 1}, "dict is not of type Order"),
        (PydanticCodec(Refund), Order(orderNumber=1), "Order is not of type Refund"),
        (Faulty(ValueError("no")), 1, r"ValueError\('no'\)"),
        (Faulty("text"), 1, "as str, not as bytes"),
        (Faulty(None), 1, "as NoneType, not as bytes"),
        (Faulty(bytearray(b"b")), 1, "as bytearray, not as bytes"),
    ],
)
def test_codec_error_is_raised_when_a_value_has_no_bytes(codec: Codec[Any], value: Any, why: str):
    with pytest.raises(CodecError, match=why) as told:
        encode_value(codec, value, subject="orders")
    assert told.value.fate is Fate.NOT_DONE
    assert (told.value.codec, told.value.subject) == (codec.name, "orders")


@pytest.mark.parametrize(
    ("codec", "value", "why"),
    [
        (PydanticCodec(Secret), Secret(token="s3cret"), "stored as asterisks"),
        (PydanticCodec(Secret), Secret(token="", nested=[{"a": b"s3cret"}]), "stored as asterisks"),
        (PydanticCodec(Secret), Secret(token="", named={"s3cret": 1}), "stored as asterisks"),
        (PydanticCodec(Secret), Secret(token="", queued=["s3cret"]), "stored as asterisks"),
        (PydanticCodec(Excluded), Excluded(needed=1), "needed: Field required"),
        (PydanticCodec(TwoNames), TwoNames(**{"in": 1}), "in: Field required"),
        (PydanticCodec(Cents), Cents(amount=150), "amount: Input should be a valid integer"),
        (PydanticCodec(Order), Larger(orderNumber=1, more=2), "would get a different Larger"),
        (PydanticCodec(Order), Order.model_construct(number="x"), "could decode it"),
        (JsonCodec(Paid), Paid("seven", dt.date(2024, 5, 1)), r"\$.order"),
        (JsonCodec(Struct), Struct("n", ["x"]), r"\$.parts"),
        (JsonCodec(Struct), LargerStruct("n", [1], 2), "would get a different Struct"),
        (JsonCodec(dict[str, int]), {"a": "b"}, "could decode it"),
    ],
)
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
def test_codec_error_is_raised_when_a_receiver_would_not_get_the_value(
    codec: Codec[Any], value: Any, why: str
):
    with pytest.raises(CodecError, match=why) as told:
        encode_value(codec, value, subject="orders")
    assert "s3cret" not in str(told.value)


@pytest.mark.parametrize(
    ("codec", "value"),
    [
        (PydanticCodec(Shown), Shown(token="s3cret")),
        (PydanticCodec(Secret), Secret(token="")),
        (PydanticCodec(Cached), Cached(number=1, cache={"a": 1})),
        (PydanticCodec(Order), Refund(orderNumber=1)),
        (PydanticCodec(OrderHolder), OrderHolder(order=Order(orderNumber=1))),
        (JsonCodec(dict[str, Any]), {"a": (1, 2)}),
        (JsonCodec(list[float]), [1, 2.5]),
    ],
)
def test_value_is_encoded_when_its_json_loses_nothing_that_is_sent(codec: Codec[Any], value: Any):
    """Private attributes, fields excluded on purpose, and tuples that are lists in JSON, are no
    loss.
    """
    if isinstance(value, Shown):
        value._used = 7
    received = codec.decode(codec.encode(value))
    assert codec.decode(codec.encode(received)) == received


@pytest.mark.parametrize(
    ("codec", "data"),
    [
        (TextCodec(), b"\xff"),
        (JsonCodec(), b"{"),
        (JsonCodec(Struct), b'{"name":1,"parts":[]}'),
        (PydanticCodec(Order), b'{"orderNumber":"x"}'),
        (Faulty(RecursionError()), b"1"),
    ],
)
def test_codec_error_names_the_message_when_bytes_have_no_value(codec: Codec[Any], data: bytes):
    with pytest.raises(CodecError, match="message 7 of partition 3 of orders") as told:
        decode_value(codec, data, subject="orders", partition_id=3, offset=7)
    assert told.value.__cause__ is not None
    assert (told.value.partition_id, told.value.offset) == (3, 7)
    assert pickle.loads(pickle.dumps(told.value)).offset == 7


def test_interruption_is_no_codec_error():
    """Ctrl-C in the middle of a codec ends what the program does."""
    with pytest.raises(KeyboardInterrupt):
        encode_value(Faulty(KeyboardInterrupt()), 1, subject="s")


@pytest.mark.parametrize("codec", [JsonCodec, "json", {"encode": 1}, b"", msgspec.json])
def test_config_error_is_raised_for_other_than_codecs(codec: object):
    with pytest.raises(ConfigError, match="a codec is an object"):
        check_codec(codec)


def test_config_error_is_raised_for_types_that_cannot_be_decoded():
    with pytest.raises(ConfigError, match="cannot decode"):
        JsonCodec(dict[int, Struct] | list[int] | dict[str, int])
    with pytest.raises(ConfigError, match="a class of pydantic 2"):
        PydanticCodec(Paid)


def test_decode_returns_the_bytes_when_no_client_delivered_the_message():
    assert Message("s", b"", b"v", 0, 1, 0).decode() == b"v"


def test_keylane_never_imports_pydantic():
    text = (
        "import keylane, sys; keylane.PydanticCodec; keylane.Producer; print('pydantic' in "
        "sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-I", "-c", text], text=True) == "False\n"
