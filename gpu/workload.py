"""The shape of a request: what a placement is measured and validated for."""

from __future__ import annotations

from dataclasses import dataclass, fields

from residency.errors import WorkloadError


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One request shape. `width`, `height` in pixels; `frames`, `steps`, `batch` are counts, all at least 1."""

    width: int
    height: int
    frames: int
    steps: int
    batch: int

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise WorkloadError(field=field.name, value=value)

    @property
    def units(self) -> int:
        """Pixels times frames times batch: the size axis along which activations grow."""
        return self.width * self.height * self.frames * self.batch
