"""Codecs for text and for JSON. Pure.

Checks for numbers that JSON does not have: encoders write NaN and infinity as null, which no
decoder turns back into a number.

Resolves a type annotation (class, union, generic alias or NewType) to the runtime classes of its
values.
"""

from __future__ import annotations

import math
import re
import types
from collections.abc import Callable
from typing import (
    Annotated,
    Any,
    Generic,
    Literal,
    Self,
    TypeVar,
    Union,
    get_args,
    get_origin,
    is_typeddict,
    overload,
)

import msgspec

from ..errors import ConfigError

NOT_IN_JSON = "JSON has no NaN or infinity, and they would be stored as null: send None, or text"


_pack = msgspec.msgpack.Encoder().encode
_packed_so = re.compile(rb"\xcb[\x7f\xff][\xf0-\xff]").search
"""Finds the first bytes of NaN and infinity in MessagePack; a text may contain these bytes as well.
"""


def may_lack_json(value: object) -> bool:
    """
    Return False if a value that has JSON surely contains neither NaN nor infinity; this takes a
    tenth of the time of `all_finite`.

    Values with None are common, and a look at each part of them would cost more than encoding them.
    """
    try:
        return _packed_so(_pack(value)) is not None
    except (OverflowError, RecursionError, TypeError, ValueError):
        # It has JSON but no MessagePack, for example a number of 65 bits.
        return True


def all_finite(value: object) -> bool:
    """Return True if a value of dicts, lists, texts and numbers contains neither NaN nor
    infinity.
    """
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, float):
            if not math.isfinite(each):
                return False
        elif isinstance(each, dict):
            left.extend(each.values())
        elif isinstance(each, list | tuple | set | frozenset):
            left.extend(each)
    return True


def is_null_in(value: object, in_json: object) -> bool:
    """Return True if a number in a value of dicts, lists, texts and numbers is null in its JSON,
    which `in_json` has decoded.
    """
    left = [(value, in_json)]
    while left:
        each, stored = left.pop()
        if isinstance(each, float):
            if stored is None:
                return True
        elif isinstance(each, dict) and isinstance(stored, dict):
            left.extend((inner, stored.get(name)) for name, inner in each.items() if name in stored)
        elif isinstance(each, list) and isinstance(stored, list):
            left.extend(zip(each, stored, strict=False))
    return False


def classes_of(kind: Any) -> tuple[type, ...] | None:
    """
    Return the classes that a value of `kind` can have; None if they are unknown, as for Any.

    An int is a value of float, as type checkers see it; the caller must distinguish bool, which is
    a subclass of int.
    """
    if kind is Any:
        return None
    if is_typeddict(kind):
        return (dict,)
    if kind is None:
        return (type(None),)
    origin = get_origin(kind)
    if origin is Annotated:
        return classes_of(get_args(kind)[0])
    if origin is Literal:
        return tuple({type(each) for each in get_args(kind)})
    if origin is Union or origin is types.UnionType:
        return _of_all(get_args(kind))
    if origin is not None:
        return classes_of(origin)
    if isinstance(kind, type):
        if getattr(kind, "_is_protocol", False):
            return None
        return (float, int) if kind is float else (kind,)
    stands_for = getattr(kind, "__supertype__", None) or getattr(kind, "__value__", None)
    return None if stands_for is None else classes_of(stands_for)


def _of_all(kinds: tuple[Any, ...]) -> tuple[type, ...] | None:
    classes: list[type] = []
    for kind in kinds:
        some = classes_of(kind)
        if some is None:
            return None
        classes += some
    return tuple(classes)


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
