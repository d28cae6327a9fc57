"""The base of every model of `acceptance.json`."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


class Record(BaseModel):
    """No unknown keys, no NaN or infinity (JSON has neither).

    Counters and times are stored; rates are properties computed from them. They are written for
    readers of the file, and computed anew when it is loaded."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _leave_out_computed(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {key: value for key, value in data.items() if key not in cls.model_computed_fields}
