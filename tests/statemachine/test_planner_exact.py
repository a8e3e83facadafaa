"""The planner's choice on small pipelines: the one that trying everything finds, by the definitions alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from residency.effects.place import order_effects
from residency.effects.spec import EffectSpec
from residency.errors import PlacementInfeasible
from residency.gpu.placement import RESIDENT, ComponentPlacement, HostTier, Mode, Placement
from residency.gpu.records import HostReading
from residency.gpu.specs import window_bytes
from residency.statemachine.planner.constraints import phase_limits
from residency.statemachine.planner.make_plan import make_plan, predict, request_model
from residency.statemachine.planner.options import Options
from residency.statemachine.planner.timeline import simulate
from residency.statemachine.policy import Policy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from residency.statemachine.planner.plan import PlanInputs
    from residency.statemachine.planner.request_model import RequestModel
    from tests.statemachine.conftest import Build

MIB = 2**20
WINDOWS = 2
EVERYTHING = Policy(
    reserve_measured_bytes=0, equal_fraction_max=1.0, window_levels=WINDOWS, simulations_max=10**6, byte_levels=10**6
)

Found = tuple[int, int, int, int, str, Placement]  # request, device, pinned, changes, digest


# --- by the definitions ----------------------------------------------------------------------------------------------


def weights(inputs: PlanInputs, placement: Placement, active: tuple[str, ...], lingering: str | None) -> int:
    """Return what lies on the device beside the window."""
    total = 0
    for spec in inputs.specs:
        one = placement.components[spec.name]
        stays = one.mode is Mode.COMPONENT_OFFLOAD and lingering == spec.name
        total += spec.device_bytes(one, in_use=spec.name in active or stays)
    return total


def pinned_bytes(inputs: PlanInputs, placement: Placement) -> int:
    return sum(
        spec.total_bytes - spec.device_bytes(one, in_use=False)
        for spec in inputs.specs
        if (one := placement.components[spec.name]).tier is HostTier.PINNED
    )


def is_feasible(inputs: PlanInputs, model: RequestModel, placement: Placement) -> bool:
    """Say whether a placement fits in every phase, and its pinned copies into their budget."""
    for limit in model.memory_limits:
        held = weights(inputs, placement, limit.active, limit.lingering)
        if held + window_bytes(inputs.specs, placement, active=limit.active) > limit.limit_bytes:
            return False
    most = max(inputs.host.pin_budget_bytes, pinned_bytes(inputs, inputs.current))
    return max(pinned_bytes(inputs, placement), pinned_on_the_way(inputs, placement)) <= most


def pinned_on_the_way(inputs: PlanInputs, placement: Placement) -> int:
    """Return what is page-locked at most while one component after the other goes to a placement."""
    now, found = dict(inputs.current.components), [pinned_bytes(inputs, inputs.current)]
    changes = [
        EffectSpec(index=0, component=name, before=now[name], after=placement.components[name])
        for name in inputs.current.changes_to(placement)
    ]
    room = inputs.cap_bytes * 7 // 8 - weights(inputs, inputs.current, (), None)
    for effect in order_effects(changes, inputs, growth_bytes=max(0, room)):
        now[effect.component] = effect.after
        found.append(pinned_bytes(inputs, Placement(components=now)))
    return max(found)


def with_window(inputs: PlanInputs, model: RequestModel, bare: Placement, share: int | None) -> Placement | None:
    """Return a placement with its largest window, or with `share` parts of what is between that and the least."""
    layerwise = [s for s in inputs.specs if bare.components[s.name].mode is Mode.LAYERWISE_OFFLOAD]
    least = max([0, *(spec.window_bytes(bare.components[spec.name]) for spec in inputs.specs)])
    looped = {name for phase in model.phases if phase.passes > 1 for name in phase.components}
    room = {
        limit.key: limit.limit_bytes - weights(inputs, bare, limit.active, limit.lingering)
        for limit in model.memory_limits
    }
    if min(room.values()) < 0:
        return None
    rigid = [room[one.key] for one in model.memory_limits if not one.active or looped & set(one.active)]
    running = [room[one.key] for one in model.memory_limits if one.active]
    most = min(rigid, default=max(running))
    free = [spec for spec in layerwise if spec.name not in inputs.configured]
    if not free:
        window = least
    elif share is None:
        leaving = sum(
            group.slot_bytes[index]
            for spec in layerwise
            for group in spec.groups
            for index in spec.away_layers(bare.components[spec.name])[group.name]
        )
        window = min(most, max(least, min(leaving, max(running))))
    else:
        window = min(most, least + max(0, most - least) * share // WINDOWS)
    if not least <= window <= most:
        return None
    components = {}
    for spec in inputs.specs:
        given = max([0, *(window - room[one.key] for one in model.memory_limits if spec.name in one.active)])
        if given:
            # All that the component needs beside weights finds room in it.
            needs = [model.cap_bytes - one.limit_bytes for one in model.memory_limits if spec.name in one.active]
            given = min(window, max(given + given // 8, *needs))
        one = replace(bare.components[spec.name], yield_bytes=given)
        components[spec.name] = replace(one, window_bytes=window) if spec in free else one
    return Placement(components=components) if has_room(inputs, model, components, window) else None


def has_room(inputs: PlanInputs, model: RequestModel, components: dict[str, ComponentPlacement], window: int) -> bool:
    """Say whether slots and what is held find room while they run; components that take turns hold at once."""
    for phase in model.phases:
        held = slots = 0
        for spec in inputs.specs:
            one = components[spec.name]
            if spec.name in phase.components and one.mode is Mode.LAYERWISE_OFFLOAD:
                sizes = {group.name: group.slot_bytes for group in spec.groups}
                own = sum(sizes[name][index] for name, indices in one.held_layers.items() for index in indices)
                slots = max(slots, spec.window_bytes(replace(one, window_bytes=0)) - own)
                held += own
        given = max(components[name].yield_bytes for name in phase.components)
        if held + slots > window - given:
            return False
    return True


def weighed(inputs: PlanInputs, model: RequestModel) -> Iterator[Placement]:
    scarce = max(inputs.host.pin_budget_bytes, pinned_bytes(inputs, inputs.current)) < sum(
        spec.total_bytes for spec in inputs.specs
    )
    tiers = (HostTier.PINNED, HostTier.PAGEABLE) if scarce else (HostTier.PINNED,)
    options = Options(model, num_levels=inputs.policy.byte_levels, num_slots=inputs.policy.num_slots, tiers=tiers)
    every = [
        [inputs.current.components[spec.name]]
        if spec.name in inputs.configured
        else [
            one.placement
            for family in options.of(
                spec, known=(inputs.current.components[spec.name], inputs.initial.components[spec.name])
            )
            for one in family.members
        ]
        for spec in inputs.specs
    ]
    names = [spec.name for spec in inputs.specs]
    yield inputs.current
    yield inputs.initial
    for chosen in product(*every):
        bare = Placement(components=dict(zip(names, chosen, strict=True)))
        for share in (None, *range(WINDOWS)):
            found = with_window(inputs, model, bare, share)
            if found is not None:
                yield found


def brute_force(inputs: PlanInputs) -> Placement | None:
    model = request_model(inputs, phase_limits(inputs))
    harmless = {inputs.current.digest, inputs.initial.digest}
    found: dict[str, Found] = {}
    for placement in weighed(inputs, model):
        digest = placement.digest
        if digest in found or (digest in inputs.excluded and digest not in harmless):
            continue
        if not is_feasible(inputs, model, placement):
            continue
        try:
            request_ns = simulate(model, placement).request_ns
        except ValueError:
            continue  # its window is too much in pieces
        idle = weights(inputs, placement, (), None) + window_bytes(inputs.specs, placement)
        changes = sum(inputs.current.components[name] != one for name, one in placement.components.items())
        found[digest] = (request_ns, idle, pinned_bytes(inputs, placement), changes, digest, placement)
    if not found:
        return None
    fastest = min(one[0] for one in found.values())
    tolerance = min(inputs.noise_ns, round(inputs.policy.equal_fraction_max * fastest))
    return min((one for one in found.values() if one[0] <= fastest + tolerance), key=lambda one: one[1:5])[5]


@st.composite
def small_inputs(draw: st.DrawFn, build: Build) -> PlanInputs:
    sizes = st.integers(1, 40)
    names = ("encoder", "transformer", "vae")[: draw(st.integers(1, 3))]
    most = {"encoder": 2, "transformer": 3, "vae": 0}
    layers = {name: tuple(draw(st.lists(sizes, max_size=most[name]))) for name in names}
    specs = tuple(
        build.spec(name, (draw(sizes) + sum(found)) * MIB, layers=tuple(size * MIB for size in found))
        for name, found in layers.items()
    )
    modes = st.sampled_from([RESIDENT, build.pageable, build.pinned])
    current = Placement(components={spec.name: draw(modes) for spec in specs})
    layer_ns = draw(st.sampled_from([None, 1_000_000, 20_000_000]))
    record = build.record(
        specs,
        current,
        gap=draw(st.sampled_from([0, 3 * MIB])),
        activations={name: draw(st.integers(0, 60)) * MIB for name in names},
        compute_ns=draw(st.sampled_from([0, 1_000_000, 30_000_000])),
        layer_ns={} if layer_ns is None else {n: {"blocks": (layer_ns,) * len(one)} for n, one in layers.items()},
    )
    if "transformer" in names and draw(st.booleans()):
        # Two that take turns, as a network that steers another one at every step.
        steps = record.workload.steps
        record = replace(
            record,
            uses=(("encoder", 1), ("transformer", 1)) * steps + (("vae", 1),) * ("vae" in names),
            layer_uses={
                name: {"blocks": (steps if name != "vae" else 1,) * len(layers[name])} if layers[name] else {}
                for name in names
            },
        )
    return build.inputs(
        cap=draw(st.integers(20, 240)) * MIB,
        specs=specs,
        current=current,
        records=(record,),
        noise_ns=draw(st.sampled_from([0, 0, 10_000_000, 60_000_000])),
        policy=EVERYTHING,
        configured={name: "set" for name in names if draw(st.integers(0, 7)) == 0},
        host=HostReading(
            available_bytes=2**40, cgroup_cap_bytes=None, pin_budget_bytes=draw(st.integers(0, 240)) * MIB
        ),
    )


@pytest.mark.timeout(3600)  # in its long form
@given(data=st.data())
@settings(max_examples=10_000 if settings.get_current_profile_name() == "long" else 20)
def test_the_plan_is_the_one_that_trying_everything_finds(build: Build, data: st.DataObject) -> None:
    inputs = data.draw(small_inputs(build))
    # The best one may be excluded: what it beats is needed then.
    for _ in range(data.draw(st.integers(0, 2))):
        best = brute_force(inputs)
        if best is not None:
            inputs = replace(inputs, excluded=(*inputs.excluded, best.digest))
    wanted = brute_force(inputs)
    if wanted is None:
        # The current placement outgrew the cap: only then is there nothing, and an estimate may not hide it.
        with pytest.raises(PlacementInfeasible) as caught:
            make_plan(replace(inputs, records=(*inputs.records, build.failed(inputs.records[0]))))
        assert caught.value.fields["needed_bytes"] > inputs.cap_bytes
        return
    plan = make_plan(inputs)
    assert plan.placement == wanted
    assert plan.exact and plan.gap_ns == 0 and not plan.relaxed
    assert plan.keep is (wanted == inputs.current)
    assert plan.prediction == predict(inputs, wanted)
    assert {one.component for one in plan.changes} == set(inputs.current.changes_to(wanted))
    assert all(phase.peak_bytes <= phase.limit_bytes for phase in plan.prediction.phases)


@given(data=st.data())
def test_a_hint_promises_no_more_than_the_model_holds(build: Build, data: st.DataObject) -> None:
    inputs = data.draw(small_inputs(build))
    if inputs.records[0].reserved_peak_bytes > inputs.cap_bytes:
        return  # nothing runs under less than it was measured with
    plan = make_plan(inputs)
    hint = plan.next_cheapest
    if hint is None:
        return
    assert hint.extra_bytes > 0 and hint.gain_ns > 0
    now = plan.placement.components[hint.component]
    window = window_bytes(inputs.specs, plan.placement)
    changed = replace(hint.placement, yield_bytes=now.yield_bytes)
    if changed.mode is Mode.LAYERWISE_OFFLOAD:
        changed = replace(changed, window_bytes=window)
    target = Placement(components={**plan.placement.components, hint.component: changed})
    for extra, fits in ((hint.extra_bytes - 1, False), (hint.extra_bytes, True)):
        larger = replace(inputs, cap_bytes=inputs.cap_bytes + extra)
        limits = request_model(larger, phase_limits(larger)).memory_limits
        assert fits is all(
            weights(inputs, target, one.active, one.lingering) + window_bytes(inputs.specs, target, active=one.active)
            <= one.limit_bytes
            for one in limits
        )
    assert predict(inputs, target).duration_ns == plan.prediction.duration_ns - hint.gain_ns


def test_a_component_that_is_never_touched_yields_of_the_window_but_keeps_its_weights(build: Build) -> None:
    specs = build.specs()
    layerwise = ComponentPlacement(
        mode=Mode.LAYERWISE_OFFLOAD, tier=HostTier.PINNED, num_slots=2, window_bytes=300 * MIB
    )
    current = Placement(components={"encoder": build.pinned, "transformer": layerwise, "vae": RESIDENT})
    record = build.record(specs, current, activations={"vae": 200 * MIB})
    plan = make_plan(build.inputs(cap=500 * MIB, current=current, records=(record,), configured={"vae": "set"}))
    vae = plan.placement.components["vae"]
    assert replace(vae, yield_bytes=0) == RESIDENT
