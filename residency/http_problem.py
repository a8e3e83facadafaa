"""Why an HTTP request is not served, as JSON with fact, values and remedy; never with anything that the caller sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """An answer that is none. status: of HTTP. headers: name -> value, beside those of every answer."""

    status: int
    fact: str
    remedy: str
    values: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def body(self) -> dict[str, Any]:
        """What is sent as JSON."""
        return {"error": {"fact": self.fact, "values": dict(self.values), "remedy": self.remedy}}
