"""Codecs for text and for JSON.  Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar, overload

import msgspec

from ..errors import ConfigError
from .finite import NOT_IN_JSON, all_finite, may_lack_json
from .kinds import classes_of

T = TypeVar("T")


class TextCodec:
    """Values of text, as UTF-8."""

    name = "text"

    def encode(self, value: str, /) -> bytes:
        """The text as UTF-8; TypeError if it is no text."""
        if not isinstance(value, str):
            raise TypeError(f"{type(value).__name__} is no str")
        return value.encode()

    def decode(self, data: bytes, /) -> str:
        """The text; UnicodeDecodeError if the bytes are not UTF-8."""
        return data.decode()


class JsonCodec(Generic[T]):
    """
    Values as JSON, by msgspec: what JSON has, dataclasses, msgspec Structs, TypedDicts, enums,
    dates and more.

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
            kind: the type that `decode` makes and checks, and of which a value has to be to be
                encoded, with all that is in it.  Without it, dict, list, str, numbers, bool and
                None, and all are encoded.

        Raises:
            ConfigError: msgspec cannot decode values of this type.
        """
        self._kind = kind
        # The types stand here: those of a class are methods to pyright, without their first
        # argument.
        try:
            self.decode: Callable[[bytes], T] = msgspec.json.Decoder(kind).decode
            """The value of JSON; a msgspec.DecodeError if the bytes are no JSON, or not of the
            type.
            """
        except TypeError as error:
            raise ConfigError(f"JsonCodec cannot decode {kind!r:.60}: {error}") from error
        encode = _exact(msgspec.json.Encoder().encode)
        self.encode: Callable[[T], bytes] = _checked(encode, self.decode, kind)
        """
        The JSON of a value; TypeError if it has none, or is not of the codec's type; ValueError if
        NaN or infinity is in it, or a receiver would get another value, or none.
        """

    def __reduce__(self) -> tuple[type[Self], tuple[Any]]:
        # Pickled messages have their codec with them; what msgspec makes of the type cannot be
        # pickled.
        return type(self), (self._kind,)


def _exact(encode: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    """`encode`, which refuses a value that it would change: NaN and infinity become null."""

    def exact(value: Any) -> bytes:
        data = encode(value)
        if b"null" in data and may_lack_json(value) and not all_finite(_plain(value)):
            raise ValueError(NOT_IN_JSON)
        return data

    return exact


def _plain(value: Any) -> object:
    """The dicts, lists, texts and numbers of a value that has JSON.  What is JSON already, a
    msgspec.Raw, is left out.
    """
    return msgspec.to_builtins(value, enc_hook=lambda _: None)


def _checked(
    encode: Callable[[Any], bytes], decode: Callable[[bytes], Any], kind: Any
) -> Callable[[Any], bytes]:
    """`encode`, which refuses values that are not of `kind`, and those whose JSON decodes to
    another value, or to none.
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
        # Lists for tuples and texts for numbers as keys are what JSON has; they are the same JSON.
        if decoded != value and encode(decoded) != data:
            raise ValueError(
                f"a receiver would get another {name} than is sent: its JSON loses some of it"
            )
        return data

    return checked
