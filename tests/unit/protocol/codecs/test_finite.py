"""A codec of JSON refuses what it would store as another value: NaN and infinity, which encoders
write as null.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keylane.protocol.codecs.codec import encode_value
from keylane.protocol.codecs.models import PydanticCodec
from keylane.protocol.codecs.text import JsonCodec, all_finite, may_contain_nan
from keylane.protocol.errors import CodecError

BAD = (math.nan, math.inf, -math.inf)
NESTED = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats()
    | st.text(max_size=5)
    | st.just("null"),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@dataclass
class Reading:
    sensor: str | None
    degrees: float | None


class Model(pydantic.BaseModel):
    degrees: float
    sensor: str | None = None


class Titled(Model):
    title: str


class WithConstants(Model, ser_json_inf_nan="constants"):
    """Written as NaN, which pydantic reads."""


class WithTexts(Model, ser_json_inf_nan="strings"):
    """Written as "NaN"."""


class Mapped(pydantic.BaseModel):
    degrees: float | None

    @pydantic.field_serializer("degrees", when_used="json")
    def none_for_nan(self, value: float | None) -> float | None:
        return None if value is None or math.isnan(value) else value


def is_finite(value: object) -> bool:
    if isinstance(value, dict):
        return all(map(is_finite, value.values()))
    if isinstance(value, list):
        return all(map(is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


@given(NESTED)
def test_json_codec_decodes_what_it_has_encoded_or_refuses_it(value: object):
    codec = JsonCodec()
    if is_finite(value):
        assert codec.decode(codec.encode(value)) == value
    else:
        with pytest.raises(ValueError, match="JSON has no NaN or infinity"):
            codec.encode(value)


@pytest.mark.parametrize("bad", BAD)
def test_json_codec_refuses_a_number_without_json_in_a_dataclass(bad: float):
    with pytest.raises(CodecError, match="would be stored as null: send None"):
        encode_value(JsonCodec(Reading), Reading(None, bad), subject="readings")


def test_json_codec_takes_none_and_the_text_null():
    codec = JsonCodec(Reading)
    assert codec.decode(codec.encode(Reading("null", None))) == Reading("null", None)


def test_json_codec_takes_json_that_is_ready():
    assert JsonCodec().encode({"a": msgspec.Raw(b"null")}) == b'{"a":null}'


@pytest.mark.parametrize("bad", BAD)
def test_pydantic_codec_refuses_a_number_that_would_become_null(bad: float):
    with pytest.raises(ValueError, match="JSON has no NaN or infinity"):
        PydanticCodec(Model).encode(Model(degrees=bad))


@pytest.mark.parametrize("title", ["Infinity War", "NaN"])
def test_pydantic_codec_refuses_it_beside_a_text_that_has_the_name_of_the_number(title: str):
    with pytest.raises(ValueError, match="JSON has no NaN or infinity"):
        PydanticCodec(Titled).encode(Titled(degrees=math.nan, title=title))


@pytest.mark.parametrize("kind", [WithConstants, WithTexts])
def test_pydantic_codec_takes_nan_beside_none_where_the_model_says_how_it_is_written(
    kind: type[Model],
):
    assert b"NaN" in PydanticCodec(kind).encode(kind(degrees=math.nan))


@pytest.mark.parametrize("kind", [WithConstants, WithTexts])
@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_pydantic_codec_takes_infinity_where_the_model_says_how_it_is_written(
    kind: type[Model], value: float
):
    codec = PydanticCodec(kind)
    assert codec.decode(codec.encode(kind(degrees=value))).degrees == value


def test_pydantic_codec_takes_nan_where_the_model_itself_makes_null_of_it():
    assert PydanticCodec(Mapped).encode(Mapped(degrees=math.nan)) == b'{"degrees":null}'


class Named(pydantic.BaseModel):
    names: list[str | None] = []
    readings: dict[str, list[float | None]] = {}


class NamedWithConstants(Named, ser_json_inf_nan="constants"):
    """Written as NaN."""


@pytest.mark.parametrize("name", ["NaN", "Infinity", "-Infinity", "null"])
def test_pydantic_codec_refuses_a_number_that_would_become_null_when_a_text_is_its_name(name: str):
    """The text was taken for the number, and the number was stored as null."""
    value = Named(names=[name], readings={name: [1.0, math.nan]})
    with pytest.raises(ValueError, match="JSON has no NaN or infinity"):
        PydanticCodec(Named).encode(value)


def test_pydantic_codec_takes_null_beside_a_number_that_is_written_as_a_constant():
    value = NamedWithConstants(names=[None], readings={"a": [None, math.inf]})
    codec = PydanticCodec(NamedWithConstants)
    assert codec.decode(codec.encode(value)) == value


@given(NESTED)
def test_value_may_contain_nan_or_is_finite(value: object):
    assert may_contain_nan(value) or all_finite(value)


@pytest.mark.parametrize(
    "value", [{"a": 2**70, "b": None}, [None, "\xcb\x7f\xf8"], [b"\xcb\x7f\xf8", None]]
)
def test_json_codec_takes_what_only_looks_like_a_number_without_json(value: object):
    """A whole number without MessagePack, and bytes that begin as NaN does there."""
    data = JsonCodec().encode(value)
    assert b"null" in data


def test_looking_for_numbers_without_json_is_skipped_when_a_value_has_only_none():
    assert not may_contain_nan({"note": None, "price": 1.5, "tags": ["null"]})
