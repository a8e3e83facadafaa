"""The shape of a request: what a placement is measured and validated for."""

from __future__ import annotations

from dataclasses import dataclass, fields

from residency.errors import WorkloadError


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One request shape. `width`, `height` in pixels; `frames`, `steps`, `batch` are counts, all at least 1.

    None of them may be left out: each is 0 then, and refused with WorkloadError like any other that is no size.
    """

    width: int = 0
    height: int = 0
    frames: int = 0
    steps: int = 0
    batch: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise WorkloadError(field=field.name, value=value)

    @property
    def units(self) -> int:
        """Pixels times frames times batch: the size axis along which activations grow."""
        return self.width * self.height * self.frames * self.batch
