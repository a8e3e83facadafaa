"""A request under a placement, simulated as the engine would run it: a queue of copies, a window, and computing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from residency.gpu.specs import window_bytes
from residency.statemachine.planner.program import Program
from residency.statemachine.planner.running import Run

if TYPE_CHECKING:
    from residency.gpu.placement import Placement
    from residency.statemachine.planner.request_model import RequestModel

REQUESTS_MAX = 6  # until they repeat themselves; where they do not, those after the first stand for all
_UNSTEADY = 2  # requests that begin with less in the window than later ones


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTimeline:
    """A time phase of a simulated request: duration_ns = compute_ns + exposed_ns, the waiting for weights."""

    name: str
    duration_ns: int
    compute_ns: int
    exposed_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One of many back-to-back requests, on average. request_ns = compute_ns + exposed_ns + contention_ns.

    exposed_by_component: component -> how long computing waited for its weights, in ns. contention_ns: by how much
    computing is slower because copies run beside it. link_busy_ns, to_device_bytes: of one request. slowest_ns: of the
    slowest one; where layers of different sizes share a window, requests may take turns. first_request_ns: of the first
    one, which starts with an empty window, without contention.
    """

    request_ns: int
    compute_ns: int
    exposed_ns: int
    contention_ns: int
    phases: tuple[PhaseTimeline, ...]
    exposed_by_component: Mapping[str, int]
    link_busy_ns: int
    to_device_bytes: int
    slowest_ns: int
    first_request_ns: int


def simulate(
    model: RequestModel, placement: Placement, *, requests: int = REQUESTS_MAX, enough_ns: int | None = None
) -> Timeline:
    """Return what one of many back-to-back requests takes: the mean of those that repeat themselves, or of the last.

    At most `requests`, at least 1, are run until then. enough_ns: longer ones need not be told exactly. Copies happen
    in the order of use, one at a time, each as soon as the window has room for it; computing waits for them, and for
    loads of whole components. Raises ValueError if the window has no room for a layer that must run.
    """
    program = Program(model, placement)
    run = Run(program, window_bytes(model.specs, placement))
    compute_by_phase = [sum(step.compute_ns for body in bodies for step in body) for bodies in program.bodies]
    counted = _steady(run, requests, None if enough_ns is None else enough_ns - sum(compute_by_phase))
    num = len(counted)
    exposed_by_phase = [sum(values) // num for values in zip(*(one.exposed_by_phase for one in counted), strict=True)]
    exposed_ns, compute_ns = sum(exposed_by_phase), sum(compute_by_phase)
    copied_ns = sum(one.copied_ns for one in counted) // num
    # While computing waits for a copy, that copy slows nothing down; loads of whole components are always waited for.
    overlapped_ns = max(0, copied_ns - max(0, exposed_ns - program.load_ns))
    contention_ns = round(overlapped_ns * model.busy_slowdown)
    return Timeline(
        request_ns=compute_ns + exposed_ns + contention_ns,
        compute_ns=compute_ns,
        exposed_ns=exposed_ns,
        contention_ns=contention_ns,
        phases=tuple(
            PhaseTimeline(name=phase.name, duration_ns=own_ns + waited_ns, compute_ns=own_ns, exposed_ns=waited_ns)
            for phase, own_ns, waited_ns in zip(model.phases, compute_by_phase, exposed_by_phase, strict=True)
        ),
        exposed_by_component={
            name: sum(one.exposed_by_component[name] for one in counted) // num for name in run.exposed_by_component
        },
        link_busy_ns=copied_ns + program.load_ns,
        to_device_bytes=sum(one.copied_bytes for one in counted) // num + program.loaded_bytes,
        slowest_ns=max(compute_ns + sum(one.exposed_by_phase) for one in counted) + contention_ns,
        first_request_ns=run.request_ends[0],
    )


class _Counted:
    """What one request waited for and moved."""

    __slots__ = ("copied_bytes", "copied_ns", "exposed_by_component", "exposed_by_phase")

    def __init__(self, run: Run) -> None:
        self.copied_ns, self.copied_bytes = run.copied_ns, run.copied_bytes
        self.exposed_by_phase = list(run.exposed_by_phase)
        self.exposed_by_component = dict(run.exposed_by_component)


def _steady(run: Run, num_requests: int, enough_ns: int | None) -> list[_Counted]:
    """Run requests until they repeat themselves, and return those that do; or else the last ones.

    enough_ns: of waiting; more need not be told exactly.
    """
    counted: list[_Counted] = []
    seen: dict[object, int] = {}
    for number in range(num_requests):
        run.request()
        counted.append(_Counted(run))
        state = run.state()
        if state in seen:
            return counted[seen[state] + 1 :]
        seen[state] = number
        last = counted[_UNSTEADY:]
        if last and enough_ns is not None and sum(sum(one.exposed_by_phase) for one in last) > enough_ns * len(last):
            return last
    return counted[min(_UNSTEADY, num_requests - 1) :]
