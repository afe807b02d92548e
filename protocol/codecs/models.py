"""A codec for pydantic models. Pydantic is never imported here, because the model brings it along.
Pure.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Generic, Protocol, Self, TypeVar

from ..errors import ConfigError
from .text import NOT_IN_JSON, is_null_in, may_lack_json


class Model(Protocol):
    """The methods of a pydantic model that the codec calls."""

    def model_dump_json(self, *, by_alias: bool, round_trip: bool) -> str:
        """Return the JSON of the model."""
        ...

    def model_dump(self, *, mode: str, by_alias: bool, round_trip: bool) -> Any:
        """Return the dicts, lists, texts and numbers of the model."""
        ...

    @classmethod
    def model_validate_json(cls, json_data: bytes, /) -> Self:
        """Return the model that the JSON describes."""
        ...


M = TypeVar("M", bound=Model)


class PydanticCodec(Generic[M]):
    """
    Encodes values of a pydantic model as JSON with the aliases of its fields; it needs pydantic 2.

        orders = PydanticCodec(Order)

    A value is refused if its JSON decodes to a different value: because of a `SecretStr` without a
    serializer that shows it, a required field that is excluded, an alias that validation does not
    know, or a field of a subclass of the model.
    """

    def __init__(self, model: type[M]) -> None:
        """
        Make a codec.

        Args:
            model: a class derived from pydantic.BaseModel.

        Raises:
            ConfigError: `model` is no such class.
        """
        if not isinstance(model, type) or not hasattr(model, "model_validate_json"):
            raise ConfigError(f"PydanticCodec takes a class of pydantic 2, not {model!r:.60}")
        self._model = model

    @property
    def name(self) -> str:
        """Name of the codec, with that of the model, for errors."""
        return f"pydantic:{self._model.__name__}"

    def encode(self, value: M, /) -> bytes:
        """
        Return the JSON of a model.

        Raises:
            TypeError: `value` is of another model.
            ValueError: a receiver would get another value, or none, because NaN and infinity would
                become null, or a secret asterisks.
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
        """Raise ValueError if the JSON does not decode to the value that was encoded."""
        name = type(value).__name__
        try:
            decoded = self._model.model_validate_json(data)
        except Exception as error:
            raise ValueError(
                f"the JSON of this {name} is none of a {self._model.__name__}, so that no receiver "
                f"could decode it: {_texts(error)}"
            ) from error
        if decoded == value:
            return
        if [each.get_secret_value() for each in _secrets(value)] != [
            each.get_secret_value() for each in _secrets(decoded)
        ]:
            raise ValueError(
                f"a secret of this {name} would be stored as asterisks: give its field a "
                f"serializer that shows the secret, or leave it out of what is sent"
            )
        # Private attributes, and fields that are excluded on purpose, are not sent.
        if decoded.model_dump_json(by_alias=True, round_trip=True) != text:
            raise ValueError(
                f"a receiver would get a different {name} than is sent: its JSON loses some of it"
            )

    def decode(self, data: bytes, /) -> M:
        """Return the model that the JSON describes; pydantic.ValidationError if it does not fit the
        model.
        """
        return self._model.model_validate_json(data)


def _secrets(value: Any) -> Iterator[Any]:
    """Yield the secrets in a model, such as pydantic's SecretStr and SecretBytes, in the order of
    its fields.
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
    """Return what a ValidationError says about each field, without the values."""
    problems = getattr(error, "errors", None)
    if not callable(problems):
        return repr(error)
    problems_text = [
        f"{'.'.join(map(str, problem['loc'])) or 'the model'}: {problem['msg']}"
        for problem in problems(include_url=False, include_context=False, include_input=False)
    ]
    return "; ".join(problems_text[:3])
