"""A codec for models of pydantic, which is never imported here: a model brings it along.  Pure."""

from __future__ import annotations

import json
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
        """The JSON of a model; TypeError if it is another one, ValueError if NaN or infinity would become null."""
        given: Any = value
        if not isinstance(given, self._model):
            raise TypeError(f"{type(given).__name__} is no {self._model.__name__}")
        text = value.model_dump_json(by_alias=True, round_trip=True)
        if "null" in text:
            dumped = value.model_dump(mode="json", by_alias=True, round_trip=True)
            # A model may be configured to write them as constants, which Python's own json reads, or as texts.
            if may_lack_json(dumped) and is_null_in(dumped, json.loads(text)):
                raise ValueError(NOT_IN_JSON)
        return text.encode()

    def decode(self, data: bytes, /) -> M:
        """The model of JSON; pydantic.ValidationError if the bytes are not of the model."""
        return self._model.model_validate_json(data)
