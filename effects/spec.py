"""What an effect will do, as a value: the part of it that the journal keeps."""

from __future__ import annotations

from dataclasses import dataclass

from residency.gpu.placement import ComponentPlacement


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectSpec:
    """One component's change: from one placement to another. `index` is its place in the transaction."""

    index: int
    component: str
    before: ComponentPlacement
    after: ComponentPlacement
