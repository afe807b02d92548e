"""The interface of a codec, and calls of it: every failure becomes a CodecError. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ..errors import CodecError, ConfigError

if TYPE_CHECKING:
    from typing_extensions import TypeVar as TypeVarWithDefault

    V = TypeVarWithDefault("V", default=bytes)
else:
    V = TypeVar("V")
"""Type of the values of a client: bytes, unless it has a codec."""

T = TypeVar("T")


class Codec(Protocol[T]):
    """
    Turns values into bytes, and bytes into values. Any object with these three members is a codec,
    for example one for Avro or Protobuf.

    `encode` and `decode` are called on the event loop, so they must be quick. An exception that
    they raise is reported as a CodecError.
    """

    @property
    def name(self) -> str:
        """Name of the codec in errors, for people."""
        ...

    def encode(self, value: T, /) -> bytes:
        """Return the bytes of a value; raise any exception if it has none."""
        ...

    def decode(self, data: bytes, /) -> T:
        """Return the value of bytes that `encode` made; raise any exception if it has none."""
        ...


def check_codec(codec: object) -> None:
    """Raise ConfigError if this is not a codec."""
    methods = (getattr(codec, "encode", None), getattr(codec, "decode", None))
    named = isinstance(getattr(codec, "name", None), str)
    if isinstance(codec, type) or not named or not all(map(callable, methods)):
        raise ConfigError(
            f"a codec is an object with name, encode and decode, as JsonCodec(), not {codec!r:.60}"
        )


def encode_value(codec: Codec[Any], value: Any, *, subject: str) -> bytes:
    """
    Return the bytes that `codec` makes of a value for `subject`.

    Raises:
        CodecError: the codec failed, or returned something other than bytes.
    """
    try:
        data: object = codec.encode(value)
    except Exception as error:
        raise CodecError(
            f"codec {codec.name} cannot encode a value for {subject}: {error!r:.200}",
            codec=codec.name,
            subject=subject,
        ) from error
    if type(data) is bytes:
        return data
    raise CodecError(
        f"codec {codec.name} encoded a value for {subject} as {type(data).__name__}, not as bytes",
        codec=codec.name,
        subject=subject,
    )


def decode_value(
    codec: Codec[T], data: bytes, *, subject: str, partition_id: int, offset: int
) -> T:
    """
    Return the value that `codec` makes of the bytes of the message at `offset`.

    Raises:
        CodecError: the codec failed.
    """
    try:
        return codec.decode(data)
    except Exception as error:
        raise CodecError(
            f"codec {codec.name} cannot decode message {offset} of partition {partition_id} of "
            f"{subject}: {error!r:.200}",
            codec=codec.name,
            subject=subject,
            partition_id=partition_id,
            offset=offset,
        ) from error
