"""The parts of a request in which the same components run, as values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerUse:
    """A layer that runs in a time phase. compute_ns: of one run. num_runs: in the whole phase; 0: once a pass."""

    group: str
    index: int
    compute_ns: int
    num_runs: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentUse:
    """A component's part of a pass. compute_ns: of one pass, its layers included; layers: in the order they run."""

    component: str
    compute_ns: int
    layers: tuple[LayerUse, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePhase:
    """A part of a request in which the same components run `passes` times, in the order of `uses`.

    beside_bytes: device bytes beside weights and window at the peak while they run, allocator slack and whatever must
    stay free included. between_bytes: the same while none of them runs, where no window is given back.
    """

    name: str
    uses: tuple[ComponentUse, ...]
    passes: int = 1
    beside_bytes: int = 0
    between_bytes: int = 0

    @property
    def components(self) -> tuple[str, ...]:
        """The components that run, each once, in the order of their first use."""
        return tuple(dict.fromkeys(use.component for use in self.uses))

    @property
    def compute_ns(self) -> int:
        """What all passes compute, in ns, without waiting for weights."""
        return self.passes * sum(use.compute_ns for use in self.uses)

    def runs(self, layer: LayerUse) -> int:
        """Return how often a layer runs in the phase."""
        return layer.num_runs or self.passes
