"""The simulation against the engine itself: the same rooms, and the same bytes over the link."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from residency.gpu.emulated import EmulatedDevice
from residency.gpu.pipeline import ManagedPipeline
from residency.gpu.placement import RESIDENT, ComponentPlacement, HostTier, Mode, Placement
from residency.gpu.specs import window_bytes
from residency.gpu.window import Window
from residency.statemachine.planner.program import Program
from residency.statemachine.planner.request_model import ComponentUse, LayerUse, RequestModel, TimePhase
from residency.statemachine.planner.running import Run
from residency.statemachine.planner.window_model import WindowModel

if TYPE_CHECKING:
    from residency.gpu.specs import ComponentSpec

UNIT = 512  # bytes: what weights are aligned to
SIZES = {"large": (3, 3, 3, 3), "small": (2, 2, 1, 2, 2, 2)}


class Layer(nn.Module):
    def __init__(self, units: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(units * UNIT // 4), requires_grad=False)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value + self.weight.mean()


class Net(nn.Module):
    """Large layers, and then small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.ModuleList([Layer(units) for units in SIZES["large"]])
        self.small = nn.ModuleList([Layer(units) for units in SIZES["small"]])

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for layer in (*self.large, *self.small):
            value = layer(value)
        return value


class Tail(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(UNIT), requires_grad=False)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value + self.weight.mean()


def phase_of(name: str, passes: int) -> TimePhase:
    layers = tuple(
        LayerUse(group=group, index=index, compute_ns=1000)
        for group, units in SIZES.items()
        for index in range(len(units))
    )
    return TimePhase(name=name, uses=(ComponentUse(component=name, compute_ns=20_000, layers=layers),), passes=passes)


def layerwise(random: Random, window: int) -> ComponentPlacement:
    kinds = {group: random.choices("rhss", k=len(units)) for group, units in SIZES.items()}
    chosen = {
        kind: {group: tuple(i for i, one in enumerate(found) if one == kind) for group, found in kinds.items()}
        for kind in "rh"
    }
    return ComponentPlacement(
        mode=Mode.LAYERWISE_OFFLOAD,
        tier=HostTier.PINNED,
        resident_layers=chosen["r"],
        held_layers=chosen["h"],
        num_slots=random.randint(1, 2),
        window_bytes=window,
    )


def served(where: dict[str, ComponentPlacement], passes: int) -> tuple[tuple[ComponentSpec, ...], list[int]]:
    """Return the components, and the bytes that each of some requests moved to the device."""
    device = EmulatedDevice(total_bytes=2**24)
    try:
        nets: dict[str, nn.Module] = {"encoder": Net(), "transformer": Net(), "vae": Tail()}
        pipeline = ManagedPipeline(nets, device=device)
        for name, placement in where.items():
            pipeline.place(name, placement)
        specs, moved = pipeline.specs, []
        for _ in range(7):
            before = device.moved_bytes()[0]
            with torch.no_grad(), pipeline.request():
                found = nets["encoder"](torch.zeros(1))
                for _ in range(passes):
                    found = nets["transformer"](found)
                nets["vae"](found)
            moved.append(device.moved_bytes()[0] - before)
    finally:
        device.close()
    return specs, moved


@pytest.mark.parametrize("seed", range(6))
def test_the_engine_moves_what_the_simulation_says(seed: int) -> None:
    random = Random(seed)
    window, passes = random.randint(8, 40) * UNIT, random.randint(1, 4)
    given_back = random.choice([0, 2, 5]) * UNIT
    where = {
        "encoder": random.choice([RESIDENT, layerwise(random, window)]),
        "transformer": layerwise(random, window),
        "vae": ComponentPlacement(mode=Mode.RESIDENT, yield_bytes=given_back),
    }
    specs, moved = served(where, passes)
    model = RequestModel(
        specs=specs,
        phases=(
            phase_of("encoder", 1),
            phase_of("transformer", passes),
            TimePhase(name="vae", uses=(ComponentUse(component="vae", compute_ns=1000),)),
        ),
        pinned_bytes_per_s=10**9,
        pageable_bytes_per_s=10**9,
        cap_bytes=2**24,
    )
    run = Run(Program(model, Placement(components=where)), window_bytes(specs, Placement(components=where)))
    simulated = []
    for _ in range(7):
        run.request()
        simulated.append(run.copied_bytes)
    # The engine learns the order in its first request. Where a window is in many pieces requests take turns, and the
    # two may be at different turns: on average they must agree.
    assert sum(moved[2:]) == pytest.approx(sum(simulated[2:]), rel=0.1)


@given(data=st.data())
def test_rooms_are_cut_as_the_engine_cuts_them(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 30)) * UNIT
    yields = data.draw(st.lists(st.integers(1, 30).map(lambda units: units * UNIT), max_size=2))
    device = EmulatedDevice(total_bytes=2**24)
    try:
        window, ours = Window(device, num_bytes=size, yields=yields), WindowModel(size, yields)
        window.grow()
        taken: list[tuple[Any, Any]] = []
        for _ in range(data.draw(st.integers(1, 20))):
            gives_back: bool = data.draw(st.booleans())
            if taken and gives_back:
                theirs, own = taken.pop(data.draw(st.integers(0, len(taken) - 1)))
                window.give(theirs, after=[device.mark()])
                ours.give(own, 0)
                continue
            wanted = data.draw(st.integers(1, 6)) * UNIT
            yielded = data.draw(st.sampled_from([0, *yields]))
            is_held = data.draw(st.booleans())
            room = window.take(wanted, yielded=yielded, is_held=is_held)
            found = ours.take(wanted, yielded=yielded, is_held=is_held)
            assert (room is None) is (found is None)
            if room is not None and found is not None:
                assert (room.start, room.num_bytes) == (found[0][1], found[0][2] - found[0][1])
                assert window.stays(room, yielded) and ours.stays(found[0], yielded)
                taken.append((room, found[0]))
    finally:
        device.close()


def test_a_window_that_is_given_back_may_be_written_to_again_from_then_on() -> None:
    ours = WindowModel(4, [2])
    assert ours.take(2, yielded=2, is_held=False) == ((0, 0, 2), 0)
    assert ours.take(2, yielded=2, is_held=False) is None
    ours.regrow(2, 70)
    assert ours.take(2, yielded=0, is_held=False) == ((1, 0, 2), 70)
    with pytest.raises(TypeError):
        ours.take(1)  # type: ignore[call-arg]
