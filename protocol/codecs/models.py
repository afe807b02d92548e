"""A codec for pydantic models. This module does not import pydantic, because the model's methods
are sufficient. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from typing import Any, Generic, Protocol, Self, TypeVar

from ..errors import ConfigError
from .text import NOT_IN_JSON, became_null, may_contain_nan


class Model(Protocol):
    """The methods of pydantic models that are called by the codec."""

    def model_dump_json(self, *, by_alias: bool, round_trip: bool) -> str:
        """Return the JSON of the model."""
        ...

    def model_dump(self, *, mode: str, by_alias: bool, round_trip: bool) -> Any:
        """Return the model as dicts, lists, strings and numbers."""
        ...

    @classmethod
    def model_validate_json(cls, json_data: bytes, /) -> Self:
        """Return the model that is described by the JSON."""
        ...


M = TypeVar("M", bound=Model)


class PydanticCodec(Generic[M]):
    """
    Encodes instances of a pydantic model as JSON with field aliases. Requires pydantic 2.

        orders = PydanticCodec(Order)

    A value is refused if its JSON would decode to a different value. Possible causes are a
    `SecretStr` without a serializer that reveals it, an excluded required field, an alias that
    validation does not accept, and an instance of a subclass with additional fields. If a nested
    model is an instance of a subclass, pydantic stores only the fields of the declared class.
    """

    def __init__(self, model: type[M]) -> None:
        """
        Create a codec for a model.

        Args:
            model: a class derived from pydantic.BaseModel.

        Raises:
            ConfigError: `model` is not such a class.
        """
        if not isinstance(model, type) or not hasattr(model, "model_validate_json"):
            raise ConfigError(f"PydanticCodec takes a class of pydantic 2, not {model!r:.60}")
        self._model = model

    @property
    def name(self) -> str:
        """The name of the codec in error messages, which includes the name of the model."""
        return f"pydantic:{self._model.__name__}"

    def encode(self, value: M, /) -> bytes:
        """
        Return the JSON of a model.

        Raises:
            TypeError: `value` is not an instance of the model.
            ValueError: a receiver would get a different value, or could not decode it. For example,
                NaN and infinity would become null, and a secret would become asterisks.
        """
        model_value: Any = value
        if not isinstance(model_value, self._model):
            raise TypeError(f"{type(model_value).__name__} is not of type {self._model.__name__}")
        text = value.model_dump_json(by_alias=True, round_trip=True)
        if "null" in text:
            plain_value = value.model_dump(mode="json", by_alias=True, round_trip=True)
            # A model may be configured to write them as constants, which json.loads accepts, or as
            # strings.
            if may_contain_nan(plain_value) and became_null(plain_value, json.loads(text)):
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
                f"the JSON of this {name} is not valid for {self._model.__name__}, so no receiver "
                f"could decode it: {_validation_texts(error)}"
            ) from error
        if decoded == value:
            return
        if [each.get_secret_value() for each in _find_secrets(value)] != [
            each.get_secret_value() for each in _find_secrets(decoded)
        ]:
            raise ValueError(
                f"a secret of this {name} would be stored as asterisks: give its field a "
                f"serializer that reveals it, or exclude the field"
            )
        # Private attributes, and fields that are excluded on purpose, are not sent.
        if decoded.model_dump_json(by_alias=True, round_trip=True) != text:
            raise ValueError(
                f"a receiver would get a different {name}: its JSON does not contain all of it"
            )

    def decode(self, data: bytes, /) -> M:
        """Decode JSON to an instance of the model. Raises pydantic.ValidationError."""
        return self._model.model_validate_json(data)


def _find_secrets(value: Any) -> Iterator[Any]:
    """Yield the secrets in a model, such as SecretStr and SecretBytes, in a deterministic order."""
    stack = [value]
    while stack:
        each = stack.pop()
        if hasattr(each, "get_secret_value"):
            yield each
        elif isinstance(each, dict):
            stack += [*each, *each.values()]
        elif isinstance(each, list | tuple | set | frozenset):
            stack.extend(each)
        elif hasattr(each, "model_dump_json"):
            stack += [vars(each), getattr(each, "model_extra", None)]
        elif hasattr(each, "__dataclass_fields__"):
            stack.append({name: getattr(each, name, None) for name in each.__dataclass_fields__})
        elif isinstance(each, Collection) and not isinstance(each, str | bytes | bytearray):
            stack.extend(each)  # such as a deque


def _validation_texts(error: Exception) -> str:
    """Return the messages of a ValidationError, with the names of the fields but without their
    values.
    """
    problems = getattr(error, "errors", None)
    if not callable(problems):
        return repr(error)
    problems_text = [
        f"{'.'.join(map(str, problem['loc'])) or 'the model'}: {problem['msg']}"
        for problem in problems(include_url=False, include_context=False, include_input=False)
    ]
    return "; ".join(problems_text[:3])
