"""Objects and arguments that clients are asked for; every field is bounded, so that any model's answer ends."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

City = Annotated[str, Field(max_length=8)]
Weekday = Annotated[int, Field(ge=1, le=7)]


class Day(BaseModel):
    """A day's weather."""

    model_config = ConfigDict(extra="forbid")

    number: Annotated[int, Field(ge=1, le=31)]
    kind: Literal["sun", "rain"]
    note: Annotated[str, Field(max_length=8)]


class Report(BaseModel):
    """An object with a list of objects."""

    model_config = ConfigDict(extra="forbid")

    city: Annotated[str, Field(min_length=1, max_length=10)]
    days: Annotated[list[Day], Field(min_length=1, max_length=2)]
    unit: Literal["C", "F"]
