"""Codecs for text and for JSON. Pure.

The codecs refuse NaN and infinity, because JSON encoders write them as null, from which no decoder
can restore a number. `classes_of` resolves a type annotation (class, union, generic alias or
NewType) to the runtime classes of its values.
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

NOT_IN_JSON = "JSON has no NaN or infinity, which would be stored as null: send None, or text"


_pack = msgspec.msgpack.Encoder().encode
_search_non_finite = re.compile(rb"\xcb[\x7f\xff][\xf0-\xff]").search
"""Finds the first bytes of NaN or infinity in MessagePack. Strings may contain these bytes, too."""


def may_contain_nan(value: object) -> bool:
    """
    Return False if a JSON-encodable value is certain to contain neither NaN nor infinity. This is
    ten times as fast as `all_finite`.

    Values with None are common, and visiting each of their parts would take longer than encoding
    them.
    """
    try:
        return _search_non_finite(_pack(value)) is not None
    except (OverflowError, RecursionError, TypeError, ValueError):
        # JSON can represent it, but MessagePack cannot, for example because it is an integer of 65
        # bits.
        return True


def all_finite(value: object) -> bool:
    """Return True if a value of dicts, lists, strings and numbers contains neither NaN nor
    infinity.
    """
    stack = [value]
    while stack:
        each = stack.pop()
        if isinstance(each, float):
            if not math.isfinite(each):
                return False
        elif isinstance(each, dict):
            stack.extend(each.values())
        elif isinstance(each, list | tuple | set | frozenset):
            stack.extend(each)
    return True


def became_null(value: object, in_json: object) -> bool:
    """Return True if a float in a value of dicts, lists, strings and numbers became null in its
    JSON. `in_json` is the decoded JSON.
    """
    stack = [(value, in_json)]
    while stack:
        each, stored_value = stack.pop()
        if isinstance(each, float):
            if stored_value is None:
                return True
        elif isinstance(each, dict) and isinstance(stored_value, dict):
            stack.extend(
                (inner, stored_value.get(name))
                for name, inner in each.items()
                if name in stored_value
            )
        elif isinstance(each, list) and isinstance(stored_value, list):
            stack.extend(zip(each, stored_value, strict=False))
    return False


def classes_of(kind: Any) -> tuple[type, ...] | None:
    """
    Return the classes that values of the type `kind` can be instances of, or None if they are
    unknown, as for Any.

    As for type checkers, an int is a valid float. The caller must exclude bool, which is a subclass
    of int.
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
        return _union_classes(get_args(kind))
    if origin is not None:
        return classes_of(origin)
    if isinstance(kind, type):
        if getattr(kind, "_is_protocol", False):
            return None
        return (float, int) if kind is float else (kind,)
    aliased = getattr(kind, "__supertype__", None) or getattr(kind, "__value__", None)
    return None if aliased is None else classes_of(aliased)


def _union_classes(kinds: tuple[Any, ...]) -> tuple[type, ...] | None:
    classes: list[type] = []
    for kind in kinds:
        member_classes = classes_of(kind)
        if member_classes is None:
            return None
        classes += member_classes
    return tuple(classes)


T = TypeVar("T")


class TextCodec:
    """Encodes text as UTF-8."""

    name = "text"

    def encode(self, value: str, /) -> bytes:
        """Encode a string as UTF-8. Raises TypeError for any other value."""
        if not isinstance(value, str):
            raise TypeError(f"{type(value).__name__} is not a str")
        return value.encode()

    def decode(self, data: bytes, /) -> str:
        """Decode UTF-8. Raises UnicodeDecodeError."""
        return data.decode()


class JsonCodec(Generic[T]):
    """
    Encodes values as JSON with msgspec: JSON types, dataclasses, msgspec Structs, TypedDicts,
    enums, dates and so on.

        orders = JsonCodec(Order)
    """

    name = "json"

    @overload
    def __init__(self: JsonCodec[Any]) -> None: ...
    @overload
    def __init__(self, kind: type[T]) -> None: ...
    def __init__(self, kind: Any = Any) -> None:
        """
        Create a codec.

        Args:
            kind: the type of the values. `encode` and `decode` check the values and all their parts
                against it. By default, values may consist of dict, list, str, numbers, bool and
                None.

        Raises:
            ConfigError: msgspec cannot decode values of this type.
        """
        self._kind = kind
        # Annotated here, because pyright would treat Callables annotated in the class as methods.
        try:
            self.decode: Callable[[bytes], T] = msgspec.json.Decoder(kind).decode
            """Decode JSON. Raises msgspec.DecodeError if the bytes are not JSON, or not of the
            type.
            """
        except TypeError as error:
            raise ConfigError(f"JsonCodec cannot decode {kind!r:.60}: {error}") from error
        encode = _rejecting_nan(msgspec.json.Encoder().encode)
        self.encode: Callable[[T], bytes] = _checking_type(encode, self.decode, kind)
        """Encode a value as JSON. Raises TypeError if that is impossible or if the value is not of
        the codec's type, and ValueError if the value contains NaN or infinity or if its JSON does
        not decode to the same value.
        """

    def __reduce__(self) -> tuple[type[Self], tuple[Any]]:
        # Pickled messages contain their codec, and msgspec's decoder cannot be pickled.
        return type(self), (self._kind,)


def _rejecting_nan(encode: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    """Wrap `encode` so that it refuses values that contain NaN or infinity, which would become
    null.
    """

    def encode_finite(value: Any) -> bytes:
        data = encode(value)
        if b"null" in data and may_contain_nan(value) and not all_finite(_to_builtins(value)):
            raise ValueError(NOT_IN_JSON)
        return data

    return encode_finite


def _to_builtins(value: Any) -> object:
    """Convert a JSON-encodable value to dicts, lists, strings and numbers. Parts that are already
    JSON, given as msgspec.Raw, become None.
    """
    return msgspec.to_builtins(value, enc_hook=lambda _: None)


def _checking_type(
    encode: Callable[[Any], bytes], decode: Callable[[bytes], Any], kind: Any
) -> Callable[[Any], bytes]:
    """Wrap `encode` so that it refuses values that are not of the type `kind`, or whose JSON does
    not decode to the same value.
    """
    if kind is Any or kind is object:
        return encode
    classes = classes_of(kind) or (object,)
    refuses_bool = bool not in classes and object not in classes
    name = getattr(kind, "__name__", kind)

    def encode_checked(value: Any) -> bytes:
        if not isinstance(value, classes) or (refuses_bool and value.__class__ is bool):
            raise TypeError(f"{type(value).__name__} is not of type {name}")
        data = encode(value)
        try:
            decoded = decode(data)
        except msgspec.MsgspecError as error:
            raise ValueError(
                f"the JSON of this value is not valid for {name}, so no receiver could decode it: "
                f"{error}"
            ) from error
        # Tuples become lists, and numeric keys become strings, without changing the JSON.
        if decoded != value and encode(decoded) != data:
            raise ValueError(
                f"a receiver would get a different {name}: its JSON does not contain all of it"
            )
        return data

    return encode_checked
