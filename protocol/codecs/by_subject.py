"""The codecs of a producer: one for all subjects, or one for each subject. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from ..ids import check_name
from .codec import Codec, check_codec, encode_value

Codecs: TypeAlias = Codec[Any] | dict[str, Codec[Any]] | None
"""A codec for all subjects, a codec for each subject, or no codec."""


def check_codecs(codec: Codec[Any] | Mapping[str, Codec[Any]] | None) -> Codecs:
    """Return the codecs if they are valid. Raises ConfigError if one is not a codec, and
    InvalidRequestError if the name of a subject is invalid.
    """
    if isinstance(codec, Mapping):
        codecs = dict(codec)
        for subject, subject_codec in codecs.items():
            check_name("subject", subject)
            check_codec(subject_codec)
        return codecs
    if codec is not None:
        check_codec(codec)
    return codec


def encode_for(codecs: Codecs, subject: str, value: Any) -> Any:
    """Encode a value if the subject has a codec; otherwise return it unchanged. Raises
    CodecError.
    """
    codec = codecs.get(subject) if isinstance(codecs, dict) else codecs
    return value if codec is None else encode_value(codec, value, subject=subject)
