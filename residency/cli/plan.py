"""The verb `plan`: what a round's measurements would give now, or under other limits; needs no GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from residency.cli.common import FINDING, exit_codes, open_reader, reading_options, say, show_json, show_lines
from residency.cli.explanation import plan_lines, shape_text
from residency.cli.frontier_plot import frontier_svg
from residency.cli.rounds import changes, placement_object, read_placement
from residency.cli.views import find_round, read_view
from residency.errors import SettingsError
from residency.gpu.placement import Mode
from residency.rendering import duration, short, size, table
from residency.settings import parse_size
from residency.statemachine.planner.make_plan import make_plan, shortfall
from residency.statemachine.planner.plan import PLANNER_VERSION
from residency.statemachine.planner.replanning import Sameness, compare_plan, frontier, journaled_inputs, what_if

if TYPE_CHECKING:
    from residency.gpu.placement import Placement
    from residency.journal.views import RoundView, StreamView
    from residency.statemachine.planner.plan import Plan, PlanInputs
    from residency.statemachine.planner.replanning import Point


STEPS_MAX = 10_000  # no sampler takes more; planning for those takes a second, and ten times as long for ten times more


def _as_size(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    try:
        return None if value is None else parse_size(value, name=param.opts[0])
    except SettingsError as error:
        raise click.BadParameter(str(error), ctx=ctx, param=param) from error


def _as_modes(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, Mode]:
    found = {}
    for value in values:
        component, equals, mode = value.partition("=")
        known = [one.value for one in Mode]
        if not equals or mode not in known:
            problem = f"{value!r} is not COMPONENT=MODE; the modes are {', '.join(known)}"
            raise click.BadParameter(problem, ctx=ctx, param=param)
        found[component] = Mode(mode)
    return found


@click.command(
    epilog=exit_codes(
        {1: "there is no such round, or nothing was planned in it", 72: "no placement fits under these limits"}
    )
)
@click.option("--round", "number", metavar="N", type=click.IntRange(min=1), help="The round; else the newest planned.")
@click.option("--vram", callback=_as_size, metavar="SIZE", help="Under another cap of device memory, such as 16GiB.")
@click.option("--host-ram", callback=_as_size, metavar="SIZE", help="With so much host memory for host copies.")
@click.option("--steps", type=click.IntRange(min=1, max=STEPS_MAX), metavar="N", help="For requests of so many steps.")
@click.option(
    "--fix",
    callback=_as_modes,
    multiple=True,
    metavar="COMPONENT=MODE",
    help="With a component in a mode; may be repeated.",
)
@click.option("--frontier", "with_frontier", is_flag=True, help="Add predicted time against memory; takes a minute.")
@click.option("--svg", type=click.Path(dir_okay=False), metavar="FILE", help="Draw the frontier into a file.")
@reading_options
def plan(
    *,
    number: int | None,
    vram: int | None,
    host_ram: int | None,
    steps: int | None,
    fix: dict[str, Mode],
    with_frontier: bool,
    svg: str | None,
    journal: str | None,
    stream: str | None,
    as_json: bool,
) -> int:
    """Plan again from what a round measured.

    Without options the plan must be the journaled one. With other limits it says what the worker would get under them;
    nothing is measured and nothing moves, and a worker that gets such limits calibrates anew.
    """
    with open_reader(journal) as reader:
        view = read_view(reader, stream)
        one = None if view is None else _round(view, number)
        if one is None:
            return FINDING
        inputs, before = journaled_inputs(one.plan), read_placement(reader, one.placement)
    if inputs is None:
        say(f"round {one.number} has no measurements to plan from: it was planned from {one.source or 'nothing'}")
        return FINDING
    asked = what_if(inputs, vram_bytes=vram, host_ram_bytes=host_ram, steps=steps, modes=fix)
    found = make_plan(asked)
    if found.relaxed and asked != inputs:
        # A worker that runs may stay as it is; one under other limits has nothing to stay with.
        raise shortfall(asked)
    sameness, why = Sameness.NOT_CHECKED, "the limits are others"
    if asked == inputs:
        sameness, why = compare_plan(one.plan, found.placement.digest)
    points = frontier(asked) if with_frontier or svg is not None else ()
    if svg is not None:
        title = f"{view.stream if view else ''}: {shape_text(msgspec.to_builtins(asked.workload))}"
        _draw(svg, points, title=title, cap_bytes=asked.cap_bytes)
    if as_json:
        show_json([_object(one, asked, found, sameness=sameness, points=points)])
    else:
        show_lines(_lines(one, inputs, asked, found, sameness=sameness, why=why, before=before, points=points))
    return 0


def _round(view: StreamView, number: int | None) -> RoundView | None:
    """Return the round that is named, else the newest with measurements; None, with a message, if there is none."""
    if number is not None:
        found = find_round(view, number)
        return None if found is None else found[1]
    planned = [one for epoch in view.epochs for one in epoch.rounds if (one.plan or {}).get("inputs")]
    if not planned:
        say("no plan was made from measurements yet")
        return None
    return planned[-1]


def _draw(path: str, points: tuple[Point, ...], *, title: str, cap_bytes: int) -> None:
    if not points:
        raise SettingsError("there is nothing to draw: no placement fits under any cap", path=path)
    try:
        Path(path).write_text(frontier_svg(points, title=title, marked_bytes=cap_bytes), encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"{path} cannot be written: {error.strerror}; name another file", path=path) from error
    say(f"drew {path}")


def _lines(
    one: RoundView,
    inputs: PlanInputs,
    asked: PlanInputs,
    found: Plan,
    *,
    sameness: Sameness,
    why: str,
    before: Placement | None,
    points: tuple[Point, ...],
) -> list[str]:
    version = (one.plan or {}).get("planner_version")
    plain = msgspec.to_builtins(found) | {"inputs": {"workload": msgspec.to_builtins(asked.workload)}}
    lines = [
        f"round {one.number}, planned by version {version} of the planner; planned again by version {PLANNER_VERSION}",
        *_limits(inputs, asked),
    ]
    if asked == inputs:
        lines.append(f"the plan is {sameness.value}{': ' + why if why else ''}")
    lines += ["", *plan_lines(plain), "", *changes(before, found.placement)]
    if points:
        lines += ["", *_frontier_lines(points)]
    return lines


def _limits(inputs: PlanInputs, asked: PlanInputs) -> list[str]:
    """Return what is asked for instead of what the round had."""
    lines = []
    if asked.cap_bytes != inputs.cap_bytes:
        lines.append(f"under a cap of {size(asked.cap_bytes)} instead of {size(inputs.cap_bytes)}")
    if asked.host != inputs.host:
        now, then = size(asked.host.pin_budget_bytes), size(inputs.host.pin_budget_bytes)
        lines.append(f"with {now} for host copies instead of {then}")
    if asked.workload != inputs.workload:
        lines.append(f"for {asked.workload.steps} steps instead of {inputs.workload.steps}")
    return [*lines, *(f"with {name} {mode.value}" for name, mode in sorted(asked.modes.items()))]


def _frontier_lines(points: tuple[Point, ...]) -> list[str]:
    rows = [
        (
            size(point.cap_bytes),
            duration(point.duration_ns),
            duration(point.duration_ns - point.compute_ns),
            size(point.device_bytes),
            size(point.pinned_bytes),
            short(point.digest),
        )
        for point in points
    ]
    return table(("CAP", "REQUEST TIME", "OF IT TRANSFERS", "HELD ON DEVICE", "PINNED", "PLACEMENT"), rows)


def _object(
    one: RoundView, asked: PlanInputs, found: Plan, *, sameness: Sameness, points: tuple[Point, ...]
) -> dict[str, Any]:
    plain = msgspec.to_builtins(replace(found, alternatives=()))
    return {
        "round": one.number,
        "journaled": {"placement": one.placement, "planner_version": (one.plan or {}).get("planner_version")},
        "limits": {
            "cap_bytes": asked.cap_bytes,
            "pin_budget_bytes": asked.host.pin_budget_bytes,
            "workload": msgspec.to_builtins(asked.workload),
            "modes": {name: mode.value for name, mode in asked.modes.items()},
        },
        "same": {Sameness.SAME: True, Sameness.DIFFERENT: False}.get(sameness),
        "plan": plain | {"placement": placement_object(found.placement), "digest": found.placement.digest},
        "frontier": msgspec.to_builtins(points),
    }
