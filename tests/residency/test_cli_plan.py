"""The verb `plan`: planning again from a journal, without a GPU and without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

from residency.cli.plan import plan as verb
from residency.cli.replay import verify
from residency.gpu.placement import RESIDENT, Mode, Placement
from residency.gpu.records import HostReading, LinkReading, PhaseRecord, RequestKind
from residency.journal.events import Draft, EventType
from residency.journal.store import Journal
from residency.statemachine.planner.make_plan import make_plan
from residency.statemachine.planner.plan import PLANNER_VERSION, PlanInputs
from residency.statemachine.planner.replanning import Sameness, check_plan, frontier, what_if
from residency.statemachine.planning import plan_payload
from residency.statemachine.source import Source, SourceKind
from tests.residency.conftest import INITIAL, MIB, SHAPE, SPECS, record

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Run = Callable[..., Result]


COMPONENTS = tuple(replace(spec, modes=tuple(Mode) if spec.groups else tuple(Mode)[:2]) for spec in SPECS)


def measured_inputs() -> PlanInputs:
    """Return what a worker of three components would measure: 2 s of computing, and a transformer in layers."""
    whole = record(RequestKind.BASELINE, INITIAL)
    phases = tuple(
        PhaseRecord(
            key=f"use:{spec.name}",
            active=(spec.name,),
            lingering=None,
            allocated_peak_bytes=spec.total_bytes + 40 * MIB,
            reserved_peak_bytes=spec.total_bytes + 40 * MIB,
            duration_ns=600_000_000,
            num_occurrences=1,
            wait_ns=10_000_000,
        )
        for spec in COMPONENTS
    )
    return PlanInputs(
        specs=COMPONENTS,
        configured={},
        current=INITIAL,
        initial=INITIAL,
        records=(replace(whole, phases=phases, duration_ns=1_800_000_000),),
        cap_bytes=270 * MIB,
        link=LinkReading(to_device_pinned=5e8, to_device_pageable=1e8, to_host_pinned=5e8, to_host_pageable=1e8),
        host=HostReading(available_bytes=2**33, cgroup_cap_bytes=None, pin_budget_bytes=2**32),
        workload=SHAPE,
    )


def write(path: Path, payload: dict[str, Any], *placements: Placement) -> None:
    journal = Journal.open(path)
    started = {"fingerprint": {}, "fingerprint_digest": "f", "initial_placement": INITIAL.digest}
    blobs = tuple(one.to_bytes() for one in (INITIAL, *placements))
    planned = Draft(
        type=EventType.TRANSITION,
        round=1,
        payload=payload,
        from_state="measuring",
        to_state="planned",
        trigger="plan",
        blobs=blobs,
    )
    first = Draft(type=EventType.EPOCH_STARTED, round=0, payload=started, blobs=blobs)
    journal.append([first, planned], stream="worker", epoch="epoch-1", witness=True)
    journal.close()


@pytest.fixture
def inputs() -> PlanInputs:
    return measured_inputs()


@pytest.fixture
def payload(inputs: PlanInputs) -> dict[str, Any]:
    found = make_plan(inputs)
    source = Source(kind=SourceKind.CALIBRATION)
    return plan_payload(source, found, inputs, target=found.placement, previous=INITIAL)


@pytest.fixture
def journal(tmp_path: Path, inputs: PlanInputs, payload: dict[str, Any]) -> Path:
    path = tmp_path / "journal.db"
    write(path, payload, make_plan(inputs).placement)
    return path


@pytest.fixture
def run(journal: Path) -> Run:
    def call(*arguments: str) -> Result:
        return CliRunner().invoke(verb, [*arguments, "--journal", str(journal)], standalone_mode=False)

    return call


def shown(result: Result) -> dict[str, Any]:
    (line,) = result.stdout.splitlines()
    found: dict[str, Any] = json.loads(line)
    return found


def test_planning_again_from_the_journal_gives_the_journaled_plan(run: Run, payload: dict[str, Any]) -> None:
    result = run()
    assert result.return_value == 0, result.output
    assert "the plan is the same" in result.stdout
    assert shown(run("--json"))["same"] is True
    assert shown(run("--json"))["plan"]["digest"] == payload["placement"]
    assert check_plan(json.loads(json.dumps(payload))) == (Sameness.SAME, "")


def test_a_plan_of_another_version_of_the_planner_is_not_checked(payload: dict[str, Any]) -> None:
    older = {**payload, "planner_version": PLANNER_VERSION - 1}
    assert check_plan(older) == (
        Sameness.NOT_CHECKED,
        f"it was planned by version {PLANNER_VERSION - 1}, this is version {PLANNER_VERSION}",
    )
    assert check_plan({"placement": "x", "source": "journal"})[0] is Sameness.NOT_CHECKED
    assert check_plan({**payload, "inputs": {"specs": 5}})[0] is Sameness.NOT_CHECKED
    assert check_plan(None)[0] is Sameness.NOT_CHECKED


def test_a_journaled_plan_that_its_inputs_do_not_give_is_found(payload: dict[str, Any]) -> None:
    other = {**payload, "placement": "ab" * 32}
    same, why = check_plan(other)
    assert same is Sameness.DIFFERENT and why == f"{payload['placement']} instead of {'ab' * 32}"
    absurd = json.loads(json.dumps(payload))
    absurd["inputs"]["cap_bytes"] = -1
    assert check_plan(absurd)[0] is Sameness.DIFFERENT


def test_other_limits_give_another_plan_and_say_what_changes(run: Run) -> None:
    result = run("--vram", "150MiB", "--steps", "12", "--host-ram", "1GiB")
    assert result.return_value == 0, result.output
    for line in (
        "under a cap of 150.00 MiB instead of 270.00 MiB",
        "with 1.00 GiB for host copies instead of 4.00 GiB",
        "for 12 steps instead of 6",
        "A GiB LESS",
    ):
        assert line in result.stdout, result.stdout
    assert ["COMPONENT", "BEFORE", "PLANNED"] in [line.split() for line in result.stdout.splitlines()], result.stdout
    assert "the plan is" not in result.stdout
    found = shown(run("--vram", "150MiB", "--json"))
    assert found["same"] is None
    assert found["limits"]["cap_bytes"] == 150 * MIB
    assert found["plan"]["placement"]["transformer"]["mode"] == "layerwise-offload"


def test_a_component_can_be_asked_for_in_a_mode(run: Run) -> None:
    for mode in ("layerwise-offload", "component-offload", "resident"):
        found = shown(run("--fix", f"transformer={mode}", "--vram", "400MiB", "--json"))
        assert found["plan"]["placement"]["transformer"]["mode"] == mode
        assert found["limits"]["modes"] == {"transformer": mode}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--vram", "16"), "16"),
        (("--fix", "transformer"), "is not COMPONENT=MODE"),
        (("--fix", "transformer=nowhere"), "the modes are resident, component-offload, layerwise-offload"),
        (("--fix", "unet=resident"), "the pipeline has no component 'unet'"),
        (("--vram", "1MiB"), "no placement fits"),
        (("--steps", "99999999999"), "1<=x<=10000"),
        (("--svg", "/nowhere/at/all.svg"), "cannot be written"),
    ],
)
def test_what_cannot_be_asked_is_an_error_that_says_why(run: Run, arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert result.exception is not None
    assert message in str(result.exception)


def test_the_frontier_falls_with_memory_and_ends_at_what_computing_takes(run: Run, tmp_path: Path) -> None:
    picture = tmp_path / "frontier.svg"
    found = shown(run("--frontier", "--svg", str(picture), "--json"))["frontier"]
    caps, times = [point["cap_bytes"] for point in found], [point["duration_ns"] for point in found]
    assert caps == sorted(caps) and times == sorted(times, reverse=True)
    assert times[-1] == found[-1]["compute_ns"] < times[0]
    root = ElementTree.fromstring(picture.read_text(encoding="utf-8"))
    assert root.tag.endswith("svg")
    assert len(root.findall("{http://www.w3.org/2000/svg}circle")) == len(found)
    lines = run("--frontier").stdout
    assert "CAP" in lines and "OF IT TRANSFERS" in lines


def test_a_frontier_needs_no_journal(inputs: PlanInputs) -> None:
    points = frontier(inputs, num_points=4)
    assert points[0].cap_bytes < inputs.cap_bytes < points[-1].cap_bytes
    only = what_if(inputs, modes={"transformer": Mode.COMPONENT_OFFLOAD})
    assert frontier(only, num_points=2)[-1].duration_ns > points[-1].duration_ns


def test_what_ran_out_of_memory_may_do_under_a_larger_cap(inputs: PlanInputs) -> None:
    whole = replace(inputs.records[0], kind=RequestKind.VALIDATION, placement_digest=OTHER.digest)
    failed = replace(whole, succeeded=False, out_of_memory=True, error="out of memory", output_digest=None)
    tried = replace(
        inputs, records=(*inputs.records, failed), placements=(OTHER,), excluded=(OTHER.digest,), cap_bytes=520 * MIB
    )
    assert make_plan(tried).placement != OTHER
    assert make_plan(what_if(tried, vram_bytes=520 * MIB)).placement != OTHER
    assert make_plan(what_if(tried, vram_bytes=2**30)).placement == OTHER
    # Under a smaller one what was short is short still.
    assert make_plan(what_if(tried, vram_bytes=500 * MIB)).placement != OTHER


def test_without_a_plan_there_is_nothing_to_plan_again(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    write(path, {"placement": INITIAL.digest, "previous": INITIAL.digest, "source": "journal"})
    for arguments in ((), ("--round", "1"), ("--round", "7")):
        result = CliRunner().invoke(verb, [*arguments, "--journal", str(path)], standalone_mode=False)
        assert result.return_value == 1
        assert result.stderr


def test_it_loads_no_torch() -> None:
    code = "import sys; import residency.cli.plan; print('torch' in sys.modules, 'sqlalchemy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


# --- verify --plans ---------------------------------------------------------------------------------------------------

OTHER = Placement(components={spec.name: RESIDENT for spec in COMPONENTS})


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        ({}, 0, "round 1: the same"),
        ({"planner_version": PLANNER_VERSION - 1}, 0, "round 1: not checked"),
        ({"placement": OTHER.digest}, 1, "round 1: another"),
    ],
)
def test_verify_makes_every_plan_again(
    payload: dict[str, Any], tmp_path: Path, change: dict[str, Any], code: int, said: str
) -> None:
    write(tmp_path / "one.db", {**payload, **change}, make_plan(measured_inputs()).placement, OTHER)
    asked = ["--plans", "--journal", str(tmp_path / "one.db")]

    told = CliRunner().invoke(verify, asked, standalone_mode=False)
    as_json = CliRunner().invoke(verify, [*asked, "--json"], standalone_mode=False)

    assert told.return_value == as_json.return_value == code
    assert said in told.stdout
    assert json.loads(as_json.stdout.splitlines()[-1])["round"] == 1
