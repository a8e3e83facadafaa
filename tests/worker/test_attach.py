"""Attaching and letting go: what is refused before anything moves, placements in files, and modules left as found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import residency
from residency.errors import (
    ModeUnavailable,
    NotAModule,
    PlacementInfeasible,
    SettingsError,
    SizeError,
    UnknownComponent,
    WorkloadError,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

QUICK = residency.Policy(image_area_max=128 * 128, samples_max=1)
SIZE = {"width": 128, "height": 128, "frames": 1, "steps": 6, "batch": 1}
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks", "_state_dict_hooks")


STREAMED = {"mode": "layerwise-offload", "tier": "pageable", "num_slots": 1}


def placing(**components: object) -> bytes:
    """A placement file for the tiny pipeline, everything resident that is not named."""
    resident = {name: {"mode": "resident"} for name in ("encoder", "denoiser", "decoder")}
    return json.dumps({"components": {**resident, **components}}).encode()


def weights(modules: Mapping[str, nn.Module]) -> dict[str, torch.Tensor]:
    return {
        f"{name}.{key}": tensor
        for name, module in modules.items()
        for key, tensor in [*module.named_parameters(), *module.named_buffers()]
    }


def anatomy(modules: Mapping[str, nn.Module]) -> dict[str, Any]:
    """Everything about modules that an owner could see changed, as values."""
    inner = {f"{name}.{path}": m for name, module in modules.items() for path, m in module.named_modules()}
    return {
        "modules": {
            path: (type(m), id(type(m)), sorted(vars(m)), [len(vars(m)[hooks]) for hooks in HOOKS], m.training)
            for path, m in inner.items()
        },
        "weights": {
            name: (
                id(t),
                type(t),
                t.device,
                t.dtype,
                t.shape,
                t.stride(),
                t.storage_offset(),
                t.untyped_storage().nbytes(),
                t.requires_grad,
                t.is_pinned(),
            )
            for name, t in weights(modules).items()
        },
    }


def with_awkward_weights(modules: dict[str, nn.Module]) -> None:
    """Add a tied weight, one that is a transposed view, and a slice with an offset."""
    denoiser, encoder = modules["denoiser"], modules["encoder"]
    blocks = denoiser.get_submodule("blocks")
    first, last = blocks.get_submodule("0"), blocks.get_submodule("5")
    last.register_parameter("bias", first.get_parameter("bias"))
    project = encoder.get_submodule("project")
    plain = project.get_parameter("weight").detach()
    project.register_parameter("weight", nn.Parameter(plain.clone().t(), requires_grad=False))
    encoder.register_buffer("table", torch.arange(64.0)[16:32])


# What cannot be used.


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"modes": {"unet": "resident"}}, UnknownComponent, "no component 'unet'; it has decoder, denoiser, encoder"),
        ({"modes": {"encoder": "layerwise-offload"}}, ModeUnavailable, "no layers to stream; it can be resident, comp"),
        ({"modes": {"encoder": "resdient"}}, ModeUnavailable, "cannot be resdient: there is no such mode; it can be"),
        ({"modes": "resident"}, SettingsError, "modes is a str, .*; pass a mapping of component to mode"),
        ({"vram": "24"}, SizeError, "vram is '24'; write a size with its unit"),
        ({"vram": 24}, SizeError, "vram is 24; write a size with its unit"),
        ({"vram": "-1GiB"}, SizeError, "vram is '-1GiB'"),
        ({"vram": "9999TiB"}, SettingsError, "the memory cap is .* at most that of the device"),
        ({"host_ram": "8"}, SizeError, "host_ram is '8'; write a size with its unit"),
        ({"workload": {**SIZE}}, SettingsError, "workload is a dict, not a Workload; pass residency.Workload"),
        ({"workload": "1024x1024"}, SettingsError, "workload is a str, not a Workload; pass residency.Workload"),
        ({"warmup": "a prompt"}, SettingsError, "warmup is a str, not a function"),
        ({"identity": "main"}, SettingsError, "identity is a str, .*; pass a mapping"),
        ({"identity": {"encoder": ""}}, SettingsError, "identity of 'encoder' is ''; pass text that changes"),
        ({"identity": {"encoder": 1}}, SettingsError, "identity of 'encoder' is 1; pass text that changes"),
        ({"tolerance": float("nan")}, SettingsError, "tolerance is nan; pass a part of the largest value"),
        ({"tolerance": -1}, SettingsError, "tolerance is -1; pass a part"),
        ({"tolerance": "0.1"}, SettingsError, "tolerance is '0.1'; pass a part"),
        ({"workloads": 5}, SettingsError, "workloads is 5; pass a list of residency.Workload"),
        ({"policy": {"x": 1}}, SettingsError, "policy is .*; pass a residency.Policy"),
        ({"device": 5}, SettingsError, "device is 5; pass 'auto', 'cuda', 'cpu', or a Device"),
        ({"journal": 5}, SettingsError, "the journal is 5; give a path or a URL"),
        ({"name": "worker\n0"}, SettingsError, "names are one line of at most 256"),
        ({"name": "w" * 257}, SettingsError, "has 257 characters; names are one line of at most 256"),
        ({"journal": " "}, SettingsError, "the journal's path is empty"),
        ({"device": "tpu"}, SettingsError, "device 'tpu' is unknown; use one of"),
        ({"placement": "missing.json"}, SettingsError, "placement file 'missing.json' cannot be used: .*No such file"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_what_cannot_be_used_is_refused_in_one_line_before_anything_moves(
    worker: Any, options: dict[str, Any], error: type[residency.ResidencyError], text: str
) -> None:
    before = anatomy(worker.pipeline.modules)

    with pytest.raises(error, match=text) as caught:
        worker.attach(fresh=False, **options)

    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    assert anatomy(worker.pipeline.modules) == before
    assert not worker.journal.exists()
    # Nothing is left behind: the same modules may be attached again.
    worker.attach(fresh=False)


def test_a_component_that_is_no_module_is_refused() -> None:
    with pytest.raises(NotAModule, match="component 'tokenizer' is a str, not a torch.nn.Module; leave it out") as one:
        residency.attach({"encoder": nn.Linear(2, 2), "tokenizer": "words"}, device="cpu")
    with pytest.raises(NotAModule, match="component 'pipeline' is a int"):
        residency.attach(3)

    assert one.value.exit_code == 2


@pytest.mark.parametrize("field", SIZE)
@pytest.mark.parametrize("value", [None, 0, -1, 2.5, "128", True])
def test_a_workload_that_does_not_say_its_size_is_refused(field: str, value: Any) -> None:
    with pytest.raises(WorkloadError, match=f"workload {field} is {value!r}; give width, height, frames") as caught:
        residency.Workload(**{**SIZE, field: value})

    assert caught.value.exit_code == 2


def test_a_workload_that_leaves_something_out_is_refused() -> None:
    with pytest.raises(WorkloadError, match="workload frames is 0; give width, height, frames"):
        residency.Workload(width=128, height=128, steps=6, batch=1)


@pytest.mark.parametrize("size", ["24", "", "GiB", "1e9", "0GiB", "nanGiB", "24 gibibytes"])
def test_a_cap_without_a_size_and_a_unit_is_refused(size: str) -> None:
    with pytest.raises(SizeError, match="vram is .*write a size with its unit, such as '24GiB'"):
        residency.limit_device(size, device="cpu")


def test_a_cap_that_the_largest_component_exceeds_is_exit_code_72(worker: Any) -> None:
    before = anatomy(worker.pipeline.modules)

    with pytest.raises(PlacementInfeasible, match="needs at least .* MiB, the cap is 0.2 MiB; raise the cap") as caught:
        worker.attach(fresh=False, vram="256KB")

    assert caught.value.exit_code == 72
    assert anatomy(worker.pipeline.modules) == before


def test_a_cap_that_configured_components_exceed_is_exit_code_72(worker: Any) -> None:
    with pytest.raises(PlacementInfeasible, match="beside what cannot leave the device") as caught:
        worker.attach(modes=dict.fromkeys(("encoder", "denoiser", "decoder"), "resident"), cap=2 * 2**20)

    assert caught.value.exit_code == 72


def test_modules_that_another_pipeline_manages_are_refused(worker: Any) -> None:
    worker.attach()

    with pytest.raises(SettingsError, match="is managed by another pipeline already; detach that one first"):
        worker.attach(fresh=False)


@pytest.mark.parametrize("returned", [None, "", [], {}], ids=repr)
def test_a_warmup_that_returns_nothing_leaves_the_worker_gated_with_the_error_told(worker: Any, returned: Any) -> None:
    manager = worker.attach(warmup=lambda shape: returned)

    report = manager.start()

    assert report.decision is residency.Decision.GATED
    assert report.reason.startswith("warmup-failed: ")
    assert report.error is not None
    assert "\n" not in report.reason
    assert manager.ready
    assert report.placement == manager._setup.initial


def test_a_configured_component_is_never_moved(worker: Any) -> None:
    manager = worker.attach(modes={"denoiser": "component-offload", "encoder": residency.Mode.RESIDENT}, policy=QUICK)

    report = manager.start()

    assert report.placement.components["denoiser"] == manager._setup.initial.components["denoiser"]
    assert report.placement.components["encoder"].mode is residency.Mode.RESIDENT
    moved = {json.loads(e.payload)["component"] for e in worker.events() if e.type == "effect.intent"}
    assert moved <= {"decoder"}


# Placements in files.


def test_an_exported_placement_is_attached_as_configured(worker: Any, tmp_path: Path) -> None:
    first = worker.attach(policy=QUICK)
    committed = first.start().placement
    first.export_placement(tmp_path / "placement.json")
    first.detach()

    manager = worker.attach(placement=tmp_path / "placement.json")
    report = manager.start()

    assert report.decision is residency.Decision.GATED
    assert report.reason.startswith("nothing-to-decide: ")
    assert report.placement == committed
    assert report.num_requests == 0
    assert set(manager._setup.configured) == {"encoder", "denoiser", "decoder"}
    assert worker.pipeline.request(residency.Workload(**SIZE)).shape == (1, 64, 768)


def test_modes_outrank_a_placement_file(worker: Any, tmp_path: Path) -> None:
    first = worker.attach(policy=QUICK)
    first.start()
    first.export_placement(tmp_path / "placement.json")
    first.detach()

    manager = worker.attach(placement=tmp_path / "placement.json", modes={"encoder": "component-offload"})

    assert manager._setup.initial.components["encoder"].mode is residency.Mode.COMPONENT_OFFLOAD


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "cannot be used: .*; write one with export_placement"),
        (b"\x00\xff rubbish", "cannot be used: "),
        (b"[1, 2]", "cannot be used: "),
        (placing(encoder={"mode": "everywhere"}), "cannot be used: .*'everywhere'"),
        (placing(encoder={"mode": "resident", "tier": "pinned"}), "cannot be used: .*contradictory"),
        (
            b'{"components": {"unet": {"mode": "resident"}}}',
            "'rubbish.json' is another pipeline's: it places unet, this one has",
        ),
        (
            placing(denoiser={**STREAMED, "resident_layers": {"blocks": [17]}}),
            "'rubbish.json': .*has 6 layers, resident or held ones are given as",
        ),
        (
            placing(encoder=STREAMED),
            "'rubbish.json': .*no repeated layers",
        ),
        (
            b'{"components": {"encoder": {"mode": "resident"}}}',
            "is another pipeline's: it places encoder, this one has decoder, ",
        ),
    ],
    ids=["empty", "bytes", "list", "mode", "contradiction", "another name", "more layers", "no layers", "too little"],
)
def test_a_file_that_is_no_placement_of_this_pipeline_is_refused_by_its_name(
    worker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rubbish.json").write_bytes(content)
    before = anatomy(worker.pipeline.modules)

    with pytest.raises(SettingsError, match=text) as caught:
        worker.attach(fresh=False, placement="rubbish.json")

    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    assert anatomy(worker.pipeline.modules) == before


# Letting go.


def test_detach_leaves_every_module_exactly_as_before(worker: Any) -> None:
    modules = worker.pipeline.modules
    with_awkward_weights(modules)
    before, values = anatomy(modules), {name: tensor.clone() for name, tensor in weights(modules).items()}
    manager = worker.attach(fresh=False, policy=QUICK)
    assert manager.start().decision is residency.Decision.COMMITTED
    expected = worker.pipeline.request(residency.Workload(**SIZE)).clone()
    assert anatomy(modules) != before

    manager.detach()

    assert anatomy(modules) == before
    assert all(torch.equal(tensor, values[name]) for name, tensor in weights(modules).items())
    assert torch.equal(worker.pipeline.request(residency.Workload(**SIZE)), expected)


def test_a_second_detach_changes_nothing_and_a_second_attach_works(worker: Any) -> None:
    modules = worker.pipeline.modules
    before = anatomy(modules)
    manager = worker.attach(fresh=False, policy=QUICK)
    committed = manager.start()
    manager.detach()
    num_events = len(worker.events())

    manager.detach()

    assert len(worker.events()) == num_events
    again = worker.attach(fresh=False, policy=QUICK)
    report = again.start()
    assert (report.decision, report.placement) == (residency.Decision.RESTORED, committed.placement)
    again.detach()
    assert anatomy(modules) == before


def test_detach_before_the_start_leaves_modules_and_journal_alone(worker: Any) -> None:
    before = anatomy(worker.pipeline.modules)
    manager = worker.attach(fresh=False)

    manager.detach()

    assert anatomy(worker.pipeline.modules) == before
    assert not worker.journal.exists()
    with pytest.raises(SettingsError, match=r"start\(\) after detach\(\), or .*; attach the pipeline again"):
        manager.start()
    assert not worker.journal.exists()


def test_attach_alone_moves_nothing(worker: Any) -> None:
    before = anatomy(worker.pipeline.modules)["weights"]

    worker.attach(fresh=False)

    assert anatomy(worker.pipeline.modules)["weights"] == before
    assert not worker.journal.exists()


# Adopting.


def test_a_worker_with_a_plain_dict_of_modules_adopts_it_in_under_fifteen_lines(
    worker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    modules, generate, device = worker.pipeline.modules, worker.pipeline.request, worker.device
    # Adopted from here,
    manager = residency.attach(
        modules,
        journal="residency.db",
        workload=residency.Workload(width=128, height=128, frames=1, steps=6, batch=1),
        warmup=generate,
        modes={"encoder": "resident"},
        device=device,
    )
    report = manager.start()
    with manager.request():
        output = generate(residency.Workload(width=128, height=128, frames=1, steps=6, batch=1))
    manager.detach()
    # to here.
    assert report.decision in {residency.Decision.COMMITTED, residency.Decision.KEPT}
    assert output.shape == (1, 64, 768)
    assert Path("residency.db").exists()
