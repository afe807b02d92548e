"""One codec for all subjects, or one by subject; the others take bytes."""

from __future__ import annotations

import pytest

from keylane.protocol.codecs.by_subject import check_codecs, encode_for
from keylane.protocol.codecs.text import JsonCodec, TextCodec
from keylane.protocol.errors import CodecError, ConfigError


def test_codec_of_a_subject_encodes_its_values_alone():
    codecs = check_codecs({"orders": JsonCodec(dict)})
    assert encode_for(codecs, "orders", {"a": 1}) == b'{"a":1}'
    assert encode_for(codecs, "other", b"bytes") == b"bytes"
    assert encode_for(check_codecs(TextCodec()), "any", "text") == b"text"
    assert encode_for(check_codecs(None), "any", b"bytes") == b"bytes"
    with pytest.raises(CodecError, match="for orders"):
        encode_for(codecs, "orders", object())


@pytest.mark.parametrize("given", [7, JsonCodec, {"s": 7}])
def test_codecs_are_refused_when_one_is_none(given):
    with pytest.raises(ConfigError, match="a codec is"):
        check_codecs(given)
