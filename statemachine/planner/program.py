"""What one request asks of the engine under a placement: steps of computing, and the layers that come through the
window for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from residency.gpu.placement import Mode

if TYPE_CHECKING:
    from residency.gpu.placement import Placement
    from residency.statemachine.planner.request_model import RequestModel
    from residency.statemachine.planner.time_phase import ComponentUse, TimePhase


class Step:
    """A stretch of computing. layer: number of the one that it needs, or -1. load_ns: of its whole component, before.

    yields: what its component gives back of the window; enters, leaves: whether a run of the component begins or ends.
    is_plain: nothing but computing, and perhaps waiting for a layer.
    """

    __slots__ = ("component", "compute_ns", "enters", "is_plain", "layer", "leaves", "load_ns", "yields")

    def __init__(self, component: str, compute_ns: int, *, layer: int = -1, yields: int = 0) -> None:
        self.component, self.compute_ns, self.layer, self.yields = component, compute_ns, layer, yields
        self.load_ns = 0
        self.enters = self.leaves = False
        self.is_plain = True


class Program:
    """One request. bodies: for every time phase the steps of each pass; equal passes are one list.

    tokens: what is used in the order in which the engine foresees it: numbers of layers, and below zero, for a run that
    yields, one less than minus the number of its amount in `amounts`. Of each layer: link_ns, num_bytes, room_bytes,
    is_held, and last_token, the place of its last use in `tokens`. load_ns, loaded_bytes: of whole components.
    """

    def __init__(self, model: RequestModel, placement: Placement) -> None:
        self.bodies: list[list[list[Step]]] = []
        self.tokens: list[int] = []
        self.amounts = sorted({one.yield_bytes for one in placement.components.values() if one.yield_bytes})
        self.link_ns: list[int] = []
        self.room_bytes: list[int] = []
        self.is_held: list[bool] = []
        self.component_of: list[str] = []
        self.last_token: list[int] = []
        self.num_bytes: list[int] = []
        self.loaded_bytes = self.load_ns = 0
        self._model, self._placement = model, placement
        self._numbers: dict[tuple[str, str, int], int] = {}
        self._sizes = {
            (spec.name, group.name): (group.layer_bytes, group.slot_bytes)
            for spec in model.specs
            for group in spec.groups
        }
        self._before: str | None = None  # the component that ran last
        for phase in model.phases:
            self.bodies.append(self._phase(phase))

    def is_uniform(self, index: int) -> bool:
        """Whether all passes of a time phase are equal."""
        bodies = self.bodies[index]
        return all(body is bodies[-1] for body in bodies[1:])

    def _phase(self, phase: TimePhase) -> list[list[Step]]:
        uneven = any(layer.num_runs for use in phase.uses for layer in use.layers)
        bodies: list[list[Step]] = []
        for number in range(phase.passes):
            if number > 1 and not uneven:
                # The second pass shows what all later ones do.
                bodies.append(bodies[-1])
                self._count(bodies[-1])
                continue
            body: list[Step] = []
            for use in phase.uses:
                self._use(body, phase, number, use)
            self._count(body)
            bodies.append(body)
        if len(bodies) > 1 and not uneven and not any(step.load_ns for step in bodies[0]):
            bodies[0] = bodies[1]
        return bodies

    def _use(self, body: list[Step], phase: TimePhase, number: int, use: ComponentUse) -> None:
        where = self._placement.components[use.component]
        # A layer that does not run in every pass runs in evenly spaced ones.
        runs = [
            (layer, (number + 1) * phase.runs(layer) // phase.passes - number * phase.runs(layer) // phase.passes)
            for layer in use.layers
        ]
        outside_ns = max(0, use.compute_ns - sum(layer.compute_ns * num for layer, num in runs))
        step = Step(use.component, outside_ns // 2, yields=where.yield_bytes)
        step.enters = True
        if where.mode is Mode.COMPONENT_OFFLOAD and self._before != use.component:
            step.load_ns = self._model.link_ns(self._model.spec(use.component).total_bytes, where.tier)
        self._before = use.component
        steps = [step]
        layerwise = where.mode is Mode.LAYERWISE_OFFLOAD
        for turn in range(max((num for _, num in runs), default=0)):
            for layer, num in runs:
                if turn >= num:
                    continue
                found = self._layer(use.component, layer.group, layer.index) if layerwise else -1
                if found < 0 and steps[-1].layer < 0:
                    steps[-1].compute_ns += layer.compute_ns
                else:
                    steps.append(Step(use.component, layer.compute_ns, layer=found, yields=where.yield_bytes))
        if steps[-1].layer < 0:
            steps[-1].compute_ns += outside_ns - outside_ns // 2
        else:
            steps.append(Step(use.component, outside_ns - outside_ns // 2, yields=where.yield_bytes))
        steps[-1].leaves = True
        steps[0].is_plain = False
        steps[-1].is_plain = not steps[-1].yields and len(steps) > 1
        body += steps

    def _layer(self, component: str, group: str, index: int) -> int:
        """Return the number of a layer that comes through the window, -1 of one that is always there."""
        where = self._placement.components[component]
        if index in where.resident_layers.get(group, ()):
            return -1
        key = component, group, index
        if key not in self._numbers:
            sizes, slots = self._sizes[component, group]
            self._numbers[key] = len(self.link_ns)
            self.link_ns.append(self._model.link_ns(sizes[index], where.tier))
            self.num_bytes.append(sizes[index])
            self.room_bytes.append(slots[index])
            self.is_held.append(index in where.held_layers.get(group, ()))
            self.component_of.append(component)
            self.last_token.append(-1)
        return self._numbers[key]

    def _count(self, body: list[Step]) -> None:
        """Book a pass: what it will use, and what it moves."""
        for step in body:
            if step.enters and step.yields:
                self.tokens.append(-1 - self.amounts.index(step.yields))
            if step.load_ns:
                self.load_ns += step.load_ns
                self.loaded_bytes += self._model.spec(step.component).total_bytes
            if step.layer >= 0:
                self.last_token[step.layer] = len(self.tokens)
                self.tokens.append(step.layer)
