"""The codecs of a client that sends to several subjects: one for all, or one by subject.  Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from ..ids import check_name
from .codec import Codec, check_codec, encode_value

Codecs: TypeAlias = Codec[Any] | dict[str, Codec[Any]] | None
"""The codec of all subjects, codecs by subject, or none."""


def checked_codecs(codec: Codec[Any] | Mapping[str, Codec[Any]] | None) -> Codecs:
    """Raises ConfigError, InvalidRequestError: something in it is not a codec, or not of a name that
    a subject may have.
    """
    if isinstance(codec, Mapping):
        codecs = dict(codec)
        for subject, each in codecs.items():
            check_name("subject", subject)
            check_codec(each)
        return codecs
    if codec is not None:
        check_codec(codec)
    return codec


def encode_for(codecs: Codecs, subject: str, value: Any) -> Any:
    """The bytes of a value for a subject with a codec; other values as they are.  Raises
    CodecError.
    """
    codec = codecs.get(subject) if isinstance(codecs, dict) else codecs
    return value if codec is None else encode_value(codec, value, subject=subject)
