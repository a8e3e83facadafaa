"""How often each layer ran, what it computes, and how long computing waited for its weights."""

from __future__ import annotations

from statistics import median_low
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from residency.gpu.device import Device, Mark
    from residency.gpu.streaming import Layer


class LayerRecorder:
    """Marks every use of a layer three times on the device: called, weights there, ended. Reads no clock in between.

    on_wait: told of the marks between which a layer waited for its weights.
    """

    def __init__(self, device: Device, *, on_wait: Callable[[tuple[Mark, Mark]], object]) -> None:
        self._device, self._on_wait = device, on_wait
        self._places: dict[Layer, tuple[str, str, int]] = {}
        self._groups: dict[str, Mapping[str, Sequence[Layer]]] = {}
        self._num_uses: dict[Layer, int] = {}
        self._runs: dict[Layer, list[tuple[Mark, Mark]]] = {}
        self._orders: dict[str, dict[Layer, None]] = {}
        self._running: dict[Layer, Mark] = {}

    def expect(self, component: str, groups: Mapping[str, Sequence[Layer]]) -> None:
        """Learn which layers a component has."""
        self._groups[component] = groups
        for group, layers in groups.items():
            self._places.update({layer: (component, group, index) for index, layer in enumerate(layers)})

    def arrived(self, layer: Layer) -> None:
        """The layer was called."""
        self._num_uses[layer] = self._num_uses.get(layer, 0) + 1
        self._orders.setdefault(self._places[layer][0], {}).setdefault(layer)
        self._running[layer] = self._device.mark(timed=True)

    def started(self, layer: Layer) -> None:
        """Its weights are there."""
        now = self._device.mark(timed=True)
        self._on_wait((self._running[layer], now))
        self._running[layer] = now

    def ended(self, layer: Layer) -> None:
        """Its call has ended."""
        started = self._running.pop(layer, None)
        if started is not None:
            self._runs.setdefault(layer, []).append((started, self._device.mark(timed=True)))

    def uses(self) -> dict[str, dict[str, tuple[int, ...]]]:
        """Return component -> layer group -> how often each layer ran."""
        return self._tabulate(self._num_uses)

    def compute_ns(self) -> dict[str, dict[str, tuple[int, ...]]]:
        """Return component -> layer group -> median duration of each layer, 0 for one that did not run.

        The device must be idle.
        """
        elapsed = self._device.elapsed_ns
        return self._tabulate({layer: median_low(elapsed(*run) for run in runs) for layer, runs in self._runs.items()})

    def order(self) -> dict[str, tuple[tuple[str, int], ...]]:
        """Return component -> (layer group, index) in the order of first use."""
        return {
            component: tuple(self._places[layer][1:] for layer in layers) for component, layers in self._orders.items()
        }

    def _tabulate(self, values: Mapping[Layer, int]) -> dict[str, dict[str, tuple[int, ...]]]:
        return {
            component: {group: tuple(values.get(layer, 0) for layer in layers) for group, layers in groups.items()}
            for component, groups in self._groups.items()
            if groups
        }
