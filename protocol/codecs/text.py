"""Codecs for text and for JSON. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar, overload

import msgspec

from ..errors import ConfigError
from .finite import NOT_IN_JSON, all_finite, may_lack_json
from .kinds import classes_of

T = TypeVar("T")


class TextCodec:
    """Encodes text as UTF-8."""

    name = "text"

    def encode(self, value: str, /) -> bytes:
        """Return the text as UTF-8; TypeError if the value is no text."""
        if not isinstance(value, str):
            raise TypeError(f"{type(value).__name__} is no str")
        return value.encode()

    def decode(self, data: bytes, /) -> str:
        """Return the text; UnicodeDecodeError if the bytes are not UTF-8."""
        return data.decode()


class JsonCodec(Generic[T]):
    """
    Encodes values as JSON with msgspec: everything that JSON has, dataclasses, msgspec Structs,
    TypedDicts, enums, dates and more.

        orders = JsonCodec(Order)
    """

    name = "json"

    @overload
    def __init__(self: JsonCodec[Any]) -> None: ...
    @overload
    def __init__(self, kind: type[T]) -> None: ...
    def __init__(self, kind: Any = Any) -> None:
        """
        Make a codec.

        Args:
            kind: the type that `decode` returns and checks, and that a value must have, with
                everything in it, to be encoded. Without it, values of dict, list, str, numbers,
                bool and None are encoded and decoded.

        Raises:
            ConfigError: msgspec cannot decode values of this type.
        """
        self._kind = kind
        # The types are written here, because pyright takes those of a class for methods, without
        # their first argument.
        try:
            self.decode: Callable[[bytes], T] = msgspec.json.Decoder(kind).decode
            """Return the value of JSON; msgspec.DecodeError if the bytes are not JSON, or not of
            the type.
            """
        except TypeError as error:
            raise ConfigError(f"JsonCodec cannot decode {kind!r:.60}: {error}") from error
        encode = _exact(msgspec.json.Encoder().encode)
        self.encode: Callable[[T], bytes] = _checked(encode, self.decode, kind)
        """
        Return the JSON of a value. TypeError if it has none, or is not of the codec's type;
        ValueError if it contains NaN or infinity, or a receiver would get another value, or none.
        """

    def __reduce__(self) -> tuple[type[Self], tuple[Any]]:
        # Pickled messages carry their codec with them, and msgspec's decoder cannot be pickled.
        return type(self), (self._kind,)


def _exact(encode: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    """Return `encode` with a check that refuses values with NaN or infinity, which would become
    null.
    """

    def exact(value: Any) -> bytes:
        data = encode(value)
        if b"null" in data and may_lack_json(value) and not all_finite(_plain(value)):
            raise ValueError(NOT_IN_JSON)
        return data

    return exact


def _plain(value: Any) -> object:
    """Return the dicts, lists, texts and numbers of a value that has JSON. Parts that are JSON
    already, a msgspec.Raw, are left out.
    """
    return msgspec.to_builtins(value, enc_hook=lambda _: None)


def _checked(
    encode: Callable[[Any], bytes], decode: Callable[[bytes], Any], kind: Any
) -> Callable[[Any], bytes]:
    """Return `encode` with a check that refuses values that are not of `kind`, and values whose
    JSON decodes to a different value, or to none.
    """
    if kind is Any or kind is object:
        return encode
    classes = classes_of(kind) or (object,)
    refuses_bool = bool not in classes and object not in classes
    name = getattr(kind, "__name__", kind)

    def checked(value: Any) -> bytes:
        if not isinstance(value, classes) or (refuses_bool and value.__class__ is bool):
            raise TypeError(f"{type(value).__name__} is no {name}")
        data = encode(value)
        try:
            decoded = decode(data)
        except msgspec.MsgspecError as error:
            raise ValueError(
                f"the JSON of this value is none of {name}, so that no receiver "
                f"could decode it: {error}"
            ) from error
        # JSON turns tuples into lists, and keys that are numbers into texts; their JSON is equal.
        if decoded != value and encode(decoded) != data:
            raise ValueError(
                f"a receiver would get a different {name} than is sent: its JSON loses some of it"
            )
        return data

    return checked
