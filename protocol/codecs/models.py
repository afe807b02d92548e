"""A codec for models of pydantic, which is never imported here: a model brings it along.  Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Generic, Protocol, Self, TypeVar

from ..errors import ConfigError
from .finite import NOT_IN_JSON, is_null_in, may_lack_json


class Model(Protocol):
    """What a model of pydantic has."""

    def model_dump_json(self, *, by_alias: bool, round_trip: bool) -> str:
        """The JSON of the model."""
        ...

    def model_dump(self, *, mode: str, by_alias: bool, round_trip: bool) -> Any:
        """The dicts, lists, texts and numbers of the model."""
        ...

    @classmethod
    def model_validate_json(cls, json_data: bytes, /) -> Self:
        """The model of JSON."""
        ...


M = TypeVar("M", bound=Model)


class PydanticCodec(Generic[M]):
    """
    Values of a pydantic model, as JSON with the aliases of its fields; pydantic 2.

        orders = PydanticCodec(Order)

    A value is refused if what its JSON decodes to is another one: a `SecretStr` without a
    serializer that shows it, a required field that is excluded, an alias that validation does not
    know, a field of a class below the model.
    """

    def __init__(self, model: type[M]) -> None:
        """
        Make a codec.

        Args:
            model: a class derived from pydantic.BaseModel.

        Raises:
            ConfigError: it is no such class.
        """
        if not isinstance(model, type) or not hasattr(model, "model_validate_json"):
            raise ConfigError(f"PydanticCodec takes a class of pydantic 2, not {model!r:.60}")
        self._model = model

    @property
    def name(self) -> str:
        """For people: has the name of the model."""
        return f"pydantic:{self._model.__name__}"

    def encode(self, value: M, /) -> bytes:
        """
        The JSON of a model.

        Raises:
            TypeError: it is another model.
            ValueError: a receiver would get another value, or none: NaN and infinity would become
                null, a secret asterisks.
        """
        given: Any = value
        if not isinstance(given, self._model):
            raise TypeError(f"{type(given).__name__} is no {self._model.__name__}")
        text = value.model_dump_json(by_alias=True, round_trip=True)
        if "null" in text:
            dumped = value.model_dump(mode="json", by_alias=True, round_trip=True)
            # A model may be configured to write them as constants, which Python's own json reads,
            # or as texts.
            if may_lack_json(dumped) and is_null_in(dumped, json.loads(text)):
                raise ValueError(NOT_IN_JSON)
        data = text.encode()
        self._check_decodes(value, text, data)
        return data

    def _check_decodes(self, value: M, text: str, data: bytes) -> None:
        """Raises ValueError: what is decoded is not what is encoded."""
        name = type(value).__name__
        try:
            decoded = self._model.model_validate_json(data)
        except Exception as error:
            raise ValueError(
                f"the JSON of this {name} is none of a {self._model.__name__}, so that no receiver "
                f"could decode it: "
                f"{_texts(error)}"
            ) from error
        if decoded == value:
            return
        if [each.get_secret_value() for each in _secrets(value)] != [
            each.get_secret_value() for each in _secrets(decoded)
        ]:
            raise ValueError(
                f"a secret of this {name} would be stored as asterisks: give its field a "
                f"serializer that shows the secret, "
                "or leave it out of what is sent"
            )
        # Private attributes, and fields that are excluded on purpose, are no part of what is sent.
        if decoded.model_dump_json(by_alias=True, round_trip=True) != text:
            raise ValueError(
                f"a receiver would get another {name} than is sent: its JSON loses some of it"
            )

    def decode(self, data: bytes, /) -> M:
        """The model of JSON; pydantic.ValidationError if the bytes are not of the model."""
        return self._model.model_validate_json(data)


def _secrets(value: Any) -> Iterator[Any]:
    """The secrets in a model, as SecretStr and SecretBytes of pydantic are, in the order of its
    fields.
    """
    left = [value]
    while left:
        each = left.pop()
        if hasattr(each, "get_secret_value"):
            yield each
        elif isinstance(each, dict):
            left += [*each, *each.values()]
        elif isinstance(each, list | tuple | set | frozenset):
            left.extend(each)
        elif hasattr(each, "model_dump_json"):
            left += [vars(each), getattr(each, "model_extra", None)]
        elif hasattr(each, "__dataclass_fields__"):
            left.append({name: getattr(each, name, None) for name in each.__dataclass_fields__})


def _texts(error: Exception) -> str:
    """What a ValidationError says of each field, without the values."""
    problems = getattr(error, "errors", None)
    if not callable(problems):
        return repr(error)
    told = [
        f"{'.'.join(map(str, problem['loc'])) or 'the model'}: {problem['msg']}"
        for problem in problems(include_url=False, include_context=False, include_input=False)
    ]
    return "; ".join(told[:3])
