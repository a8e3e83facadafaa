"""The shape of a request: what a placement is measured and validated for."""

from __future__ import annotations

from collections.abc import Mapping, Sized
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


# How pipelines name the sides of a request's shape.
_NAMES = {
    "width": ("width",),
    "height": ("height",),
    "frames": ("num_frames", "frames", "video_length"),
    "steps": ("num_inference_steps", "steps"),
}


def shape_of_call(arguments: Mapping[str, object], default: Workload) -> Workload:
    """Return the shape that the named arguments of a pipeline's call ask for; what they do not say is the default's."""
    found = {field.name: getattr(default, field.name) for field in fields(default)}
    for side, names in _NAMES.items():
        for name in names:
            value = arguments.get(name)
            if isinstance(value, int) and value >= 1:
                found[side] = value
    prompt = arguments.get("prompt")
    prompts = len(prompt) if isinstance(prompt, Sized) and not isinstance(prompt, str) else 1
    each = 1
    for name in ("num_images_per_prompt", "num_videos_per_prompt"):
        value = arguments.get(name)
        if isinstance(value, int) and value >= 1:
            each = value
    if prompts * each > 1:
        found["batch"] = prompts * each
    return Workload(**found)
