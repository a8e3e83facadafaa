"""Three real pipelines give the same bits wherever their weights live, and are left as they were found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from residency.effects.place import PlaceComponent, order_effects
from residency.effects.spec import EffectSpec
from residency.effects.transaction import Transaction
from residency.gpu.adapters import components_of
from residency.gpu.measure import measure_request
from residency.gpu.pipeline import ManagedPipeline
from residency.gpu.placement import RESIDENT, ComponentPlacement, HostTier, Mode
from residency.gpu.poison import find_poison
from residency.gpu.records import RequestKind
from residency.gpu.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Callable

    from residency.gpu.emulated import EmulatedDevice
    from residency.gpu.specs import ComponentSpec

# What a scheduler keeps between requests (tables over 1000 train steps); far less than the least component.
SCHEDULER_BYTES_MAX = 8_192
WORKLOAD = Workload(width=8, height=8, frames=1, steps=2, batch=1)


def every_placement(spec: ComponentSpec) -> list[ComponentPlacement]:
    tiers = (HostTier.PAGEABLE, HostTier.PINNED)
    found = [*(ComponentPlacement(mode=Mode.COMPONENT_OFFLOAD, tier=tier) for tier in tiers)]
    if Mode.LAYERWISE_OFFLOAD in spec.modes:
        kept = {group.name: (len(group.layer_bytes) - 1,) for group in spec.groups}
        for tier, resident in ((HostTier.PAGEABLE, {}), (HostTier.PINNED, kept)):
            found.append(
                ComponentPlacement(mode=Mode.LAYERWISE_OFFLOAD, tier=tier, resident_layers=resident, num_slots=1)
            )
    return found


def idle_bytes(pipeline: ManagedPipeline) -> int:
    placement = pipeline.placement.components
    weights = sum(spec.device_bytes(placement[spec.name], in_use=False) for spec in pipeline.specs)
    return weights + pipeline.window_bytes


def describe(pipe: Any) -> dict[str, object]:
    """Return everything about a pipeline that managing it must leave as it was."""
    facts: dict[str, object] = {"class": type(pipe)}
    for name, module in components_of(pipe)[0].items():
        for path, child in module.named_modules():
            facts[f"{name}.{path}"] = (type(child), sorted(key for key in vars(child) if key != "_diffusers_hook"))
        for path, tensor in [*module.named_parameters(), *module.named_buffers()]:
            geometry = (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.requires_grad)
            facts[f"{name}.{path} tensor"] = (id(tensor), geometry, str(tensor.device))
    return facts


def contents(pipe: Any) -> dict[str, torch.Tensor]:
    modules = components_of(pipe)[0]
    return {f"{name}.{key}": value for name, module in modules.items() for key, value in module.state_dict().items()}


def test_every_mode_of_every_component_gives_the_same_bits(
    subject: Any, managed: ManagedPipeline, device: EmulatedDevice
) -> None:
    expected = subject.request().clone()
    for spec in managed.specs:
        assert spec.fixed_reason is None
        for target in every_placement(spec):
            managed.place(spec.name, target)
            assert torch.equal(subject.request(), expected), (spec.name, target)
            assert 0 <= device.memory().allocated_bytes - idle_bytes(managed) <= SCHEDULER_BYTES_MAX
        managed.place(spec.name, RESIDENT)


@pytest.mark.parametrize("choose", [lambda found: found[0], lambda found: found[-1]])
def test_all_components_at_once_give_the_same_bits(
    subject: Any, managed: ManagedPipeline, choose: Callable[[list[ComponentPlacement]], ComponentPlacement]
) -> None:
    expected = subject.request().clone()
    for spec in managed.specs:
        managed.place(spec.name, choose(every_placement(spec)))
    to_host_bytes = managed.device.moved_bytes()[1]
    for _ in range(2):
        assert torch.equal(subject.request(), expected)
    assert managed.device.moved_bytes()[1] == to_host_bytes  # frozen weights are never copied back


def test_a_transaction_over_all_components_and_its_undo_keep_the_bits(subject: Any, managed: ManagedPipeline) -> None:
    expected = subject.request().clone()
    specs = order_effects(
        [
            EffectSpec(index=0, component=spec.name, before=RESIDENT, after=every_placement(spec)[-1])
            for spec in managed.specs
        ],
        managed,
    )
    effects = [PlaceComponent(managed, spec) for spec in specs]
    transaction = Transaction(effects, on_intent=lambda *_: None, on_outcome=lambda *_: None, find_poison=find_poison)
    before = managed.placement
    transaction.apply()
    assert managed.placement != before
    assert torch.equal(subject.request(), expected)
    transaction.revert()
    assert managed.placement == before
    assert torch.equal(subject.request(), expected)


def test_detach_leaves_a_pipeline_exactly_as_it_was_found(subject: Any, device: EmulatedDevice) -> None:
    expected = subject.request().clone()
    before, weights = describe(subject.pipe), {key: tensor.clone() for key, tensor in contents(subject.pipe).items()}
    modules, owner = components_of(subject.pipe)
    pipeline = ManagedPipeline(modules, device=device, owner=owner)
    for spec in pipeline.specs:
        pipeline.place(spec.name, every_placement(spec)[-1])
    subject.request()
    pipeline.detach()
    assert pipeline.num_hooks == 0
    assert describe(subject.pipe) == before
    assert all(torch.equal(tensor, weights[key]) for key, tensor in contents(subject.pipe).items())
    assert torch.equal(subject.request(), expected)
    assert device.memory().allocated_bytes <= SCHEDULER_BYTES_MAX


def test_state_dict_is_right_while_every_weight_is_away(subject: Any, managed: ManagedPipeline) -> None:
    weights = {key: tensor.clone() for key, tensor in contents(subject.pipe).items()}
    for spec in managed.specs:
        managed.place(spec.name, every_placement(spec)[-1])
    away = contents(subject.pipe)
    assert away.keys() == weights.keys()
    assert all(torch.equal(tensor, weights[key]) for key, tensor in away.items())


def test_an_interrupt_in_mid_request_leaves_the_state_before_it(subject: Any, managed: ManagedPipeline) -> None:
    expected = subject.request().clone()
    for spec in managed.specs:
        managed.place(spec.name, every_placement(spec)[0])
    idle = managed.device.memory().allocated_bytes
    scheduler = subject.pipe.scheduler
    step = scheduler.step

    def interrupt(*args: object, **kwargs: object) -> object:
        raise KeyboardInterrupt

    scheduler.step = interrupt
    try:
        with pytest.raises(KeyboardInterrupt):
            subject.request()
    finally:
        scheduler.step = step
    assert abs(managed.device.memory().allocated_bytes - idle) <= SCHEDULER_BYTES_MAX
    assert torch.equal(subject.request(), expected)


def test_a_measured_request_names_its_phases_and_counts_every_layer(subject: Any, managed: ManagedPipeline) -> None:
    record, output = measure_request(
        managed, subject.request, kind=RequestKind.PROBE, workload=WORKLOAD, target_steps=28
    )
    assert isinstance(output, torch.Tensor)
    assert record.succeeded and record.output_digest is not None
    names = [spec.name for spec in managed.specs]
    assert {name for name, _ in record.uses} == set(names)
    assert {f"use:{name}" for name in names} <= {phase.key for phase in record.phases}
    denoiser = "unet" if "unet" in names else "transformer"
    assert dict(record.uses)[denoiser] >= 2
    assert all(min(counts) >= 1 for group in [record.layer_uses[denoiser]] for counts in group.values())
    assert record.allocated_peak_bytes >= idle_bytes(managed)
