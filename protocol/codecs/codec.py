"""The codec interface, and functions that call a codec and convert its failures to CodecError.
Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ..errors import CodecError, ConfigError

if TYPE_CHECKING:
    from typing_extensions import TypeVar as TypeVarWithDefault

    V = TypeVarWithDefault("V", default=bytes)
else:
    V = TypeVar("V")
"""The type of a client's values: bytes, unless it has a codec."""

T = TypeVar("T")


class Codec(Protocol[T]):
    """
    Converts values to bytes and back. Any object with these three members is a codec, for example
    one for Avro or Protobuf.

    `encode` and `decode` run on the event loop, so they must be fast. Their exceptions become the
    cause of a CodecError.
    """

    @property
    def name(self) -> str:
        """The name of the codec in error messages."""
        ...

    def encode(self, value: T, /) -> bytes:
        """Encode a value. Raises any exception if that is impossible."""
        ...

    def decode(self, data: bytes, /) -> T:
        """Decode bytes that were returned by `encode`. Raises any exception if that is
        impossible.
        """
        ...


def check_codec(codec: object) -> None:
    """Raise ConfigError if this object is not a codec."""
    methods = (getattr(codec, "encode", None), getattr(codec, "decode", None))
    has_name = isinstance(getattr(codec, "name", None), str)
    if isinstance(codec, type) or not has_name or not all(map(callable, methods)):
        raise ConfigError(
            f"a codec is an object with name, encode and decode, as JsonCodec(), not {codec!r:.60}"
        )


def encode_value(codec: Codec[Any], value: Any, *, subject: str) -> bytes:
    """
    Encode a value for `subject` with `codec`.

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
    Decode the value of the message at `offset` with `codec`.

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
