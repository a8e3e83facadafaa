"""A request under a placement, simulated as the engine would run it: a queue of copies, a window, and computing."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from residency.gpu.specs import window_bytes
from residency.statemachine.planner.program import Program
from residency.statemachine.planner.window_model import Room, WindowModel

if TYPE_CHECKING:
    from residency.gpu.placement import Placement
    from residency.statemachine.planner.program import Step
    from residency.statemachine.planner.request_model import RequestModel

REQUESTS_MAX = 6  # until they repeat themselves; where they do not, those after the first stand for all
_UNSTEADY = 2  # requests that begin with less in the window than later ones
LOOKAHEAD_MAX = 512  # uses that the engine looks ahead
_PASSES_MAX = 8  # of a loop that are simulated until its passes repeat themselves, or are taken to


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


class Run:
    """Requests one after the other. The host runs ahead of the device: rooms are handed out in the order of calls, and
    a copy waits on the link until what was computed in its room has ended.
    """

    def __init__(self, program: Program, window: int) -> None:
        self._program, self._tokens = program, program.tokens
        self._window = WindowModel(window, program.amounts)
        self._rooms: dict[int, Room] = {}
        self._arrivals: dict[int, int] = {}  # layer -> when it has come
        self._passed: dict[int, int] = {}  # layer -> the last use ahead that was passed over because it was there
        self._position = self._ahead = 0  # the next use, and the first that nothing was fetched for
        self._yields: deque[tuple[int, int]] = deque()  # (place, amount) of runs ahead that want a part of the window
        self._yielded = 0
        self._is_full = False  # what is wanted next found no room, and none has become free since
        self._ready_ns = self._link_ns = 0  # when computing and the link are free
        self.request_ends: list[int] = []
        # Of the present request: by time phase, by component, and of the link.
        self.exposed_by_phase = [0] * len(program.bodies)
        self.exposed_by_component = {step.component: 0 for bodies in program.bodies for step in bodies[0]}
        self.copied_ns = self.copied_bytes = 0

    def request(self) -> None:
        """Run one request."""
        self.copied_ns = self.copied_bytes = 0
        self.exposed_by_phase = [0] * len(self.exposed_by_phase)
        self.exposed_by_component = dict.fromkeys(self.exposed_by_component, 0)
        self._regrow()
        self._run_ahead()
        for index, bodies in enumerate(self._program.bodies):
            self._phase(index, bodies)
        self.request_ends.append(self._ready_ns)

    def _phase(self, index: int, bodies: list[list[Step]]) -> None:
        """Run the passes of a time phase; what has become periodic is not run again and again."""
        number = 0
        # Where it was after each pass: the same again means that it goes on as it did from there.
        seen: dict[object, tuple[int, int, tuple[int, dict[str, int], int, int]]] = {}
        uniform = self._program.is_uniform(index)
        while number < len(bodies):
            position = self._position
            self._pass(bodies[number], index)
            number += 1
            left, length = len(bodies) - number, self._position - position
            if not uniform or left < 2:
                continue
            state = self.state()
            if state not in seen and number < _PASSES_MAX:
                seen[state] = number, self._ready_ns, self._totals(index)
                continue
            # The rooms may take long to lie as before; by then the passes seen stand for all others.
            first, first_ns, totals = seen.get(state) or list(seen.values())[1]
            period = number - first
            # As long as the queue does not look beyond the loop.
            most = (left * length - 1 - (self._ahead - self._position)) // length if length else left
            times = min(left - 1, most) // period
            if times > 0:
                self._skip(times, period * length, self._ready_ns - first_ns)
                self._repeat(index, totals, times)
                number += times * period
            uniform = False

    def _pass(self, body: list[Step], index: int) -> None:
        """Run one pass; what most steps are is done here, for this is where the time goes."""
        rooms, arrivals, is_held = self._rooms, self._arrivals, self._program.is_held
        last_token, num = self._program.last_token, len(self._tokens)
        for step in body:
            if not step.is_plain:
                self._step(step, index)
                continue
            layer = step.layer
            if layer < 0:
                self._ready_ns += step.compute_ns
                continue
            self._position = position = self._position + 1
            if layer not in rooms:
                self._fetch(layer, self._room_at_once(layer))
            if arrivals[layer] > self._ready_ns:
                self._wait(arrivals[layer], step, index)
            self._ready_ns += step.compute_ns
            if not self._is_full or self._yields:
                self._run_ahead(running=layer)
            if not is_held[layer] or last_token[layer] == (position - 1) % num:
                self._take_back(layer)
                self._run_ahead()

    def _step(self, step: Step, index: int) -> None:
        if step.enters and step.yields:
            self._position += 1
            self._yielded = max(self._yielded, step.yields)
            self._make_way()
        elif step.enters and self._yielded:
            self._regrow()
            self._run_ahead()
        if step.load_ns:
            self._wait(self._load(step.load_ns), step, index)
        layer = step.layer
        if layer < 0:
            self._ready_ns += step.compute_ns
        else:
            self._position += 1
            if layer not in self._rooms:
                self._fetch(layer, self._room_at_once(layer))
            self._wait(self._arrivals[layer], step, index)
            self._ready_ns += step.compute_ns
            self._run_ahead(running=layer)
            if not self._program.is_held[layer] or self._is_last(layer):
                self._take_back(layer)
                self._run_ahead()
        if step.leaves and step.yields:
            self._is_full = False
            self._run_ahead()

    def _regrow(self) -> None:
        """Have again what was given back; that is not when its user has ended, but when the next one comes."""
        if self._yielded:
            self._window.regrow(self._yielded, self._ready_ns)
            self._yielded, self._is_full = 0, False

    def _wait(self, until_ns: int, step: Step, index: int) -> None:
        if until_ns > self._ready_ns:
            self.exposed_by_phase[index] += until_ns - self._ready_ns
            self.exposed_by_component[step.component] += until_ns - self._ready_ns
            self._ready_ns = until_ns

    def _is_last(self, layer: int) -> bool:
        return self._program.last_token[layer] == (self._position - 1) % len(self._tokens)

    def _run_ahead(self, running: int = -1) -> None:
        """Ask for what is used next, in order, as far as there is room."""
        while self._yields and self._yields[0][0] < self._position:
            self._yields.popleft()
            self._is_full = False
        if self._is_full:
            return
        yielded = self._yielded
        for _, amount in self._yields:
            yielded = max(yielded, amount)
        num = len(self._tokens)
        ahead, end = max(self._ahead, self._position), self._position + min(LOOKAHEAD_MAX, num)
        rooms, is_held = self._rooms, self._program.is_held
        tokens = self._tokens
        while ahead < end:
            token = tokens[ahead % num]
            if token < 0:
                # What is used after it has to lie where the window stays meanwhile.
                self._yields.append((ahead, self._program.amounts[-1 - token]))
                yielded = max(yielded, self._yields[-1][1])
            elif token == running and not is_held[token]:
                break
            elif token in rooms:
                self._passed[token] = ahead
            else:
                found = self._window.take(self._program.room_bytes[token], yielded=yielded, is_held=is_held[token])
                if found is None:
                    self._is_full = True
                    break
                self._fetch(token, found)
            ahead += 1
        self._ahead = ahead

    def _fetch(self, layer: int, found: tuple[Room, int]) -> None:
        self._rooms[layer], free_ns = found
        link_ns = self._program.link_ns[layer]
        self._link_ns = self._arrivals[layer] = max(self._link_ns, free_ns) + link_ns
        self.copied_ns += link_ns
        self.copied_bytes += self._program.num_bytes[layer]

    def _take_back(self, layer: int, free_ns: int = 0) -> None:
        """Give the room of a layer back; it is free once what is computed now, and its copy, have ended."""
        self._is_full = False
        self._window.give(self._rooms.pop(layer), max(free_ns, self._ready_ns))
        del self._arrivals[layer]
        if self._passed.pop(layer, -1) >= self._position or free_ns:
            for place in range(self._position, self._ahead):
                if self._tokens[place % len(self._tokens)] == layer:
                    self._ahead = place
                    while self._yields and self._yields[-1][0] >= place:
                        self._yields.pop()
                    break

    def _make_way(self) -> None:
        """Empty the blocks of the window that are given back."""
        for layer in [one for one, room in self._rooms.items() if not self._window.stays(room, self._yielded)]:
            self._ready_ns = max(self._ready_ns, self._arrivals[layer])
            self._take_back(layer, self._arrivals[layer])

    def _room_at_once(self, layer: int) -> tuple[Room, int]:
        """Return a room for a layer that was not fetched ahead, at the cost of those that are used latest."""
        wanted, num = self._program.room_bytes[layer], len(self._tokens)
        while True:
            found = self._window.take(wanted, yielded=self._yielded, is_held=False)
            if found is not None:
                return found
            if not self._rooms:
                raise ValueError(f"the window has no room for a layer of {wanted} bytes that must run")
            expected: dict[int, int] = {}
            for distance in range(min(LOOKAHEAD_MAX, num)):
                expected.setdefault(self._tokens[(self._position + distance) % num], distance)
            victim = max(self._rooms, key=lambda one: expected.get(one, num + 1))
            self._take_back(victim, self._arrivals[victim])

    def _load(self, load_ns: int) -> int:
        """Bring a whole component, after the copy that is on the link and before those that wait; return the end."""
        now_ns, start_ns = self._ready_ns, self._ready_ns
        link_ns = self._program.link_ns
        waiting = []
        for layer, arrival_ns in self._arrivals.items():
            if arrival_ns - link_ns[layer] >= now_ns:
                waiting.append(layer)
            elif arrival_ns > now_ns:
                start_ns = arrival_ns
        for layer in waiting:
            self._arrivals[layer] += load_ns
        self._link_ns = max(self._link_ns, start_ns) + load_ns
        return start_ns + load_ns

    def _totals(self, index: int) -> tuple[int, dict[str, int], int, int]:
        return self.exposed_by_phase[index], dict(self.exposed_by_component), self.copied_ns, self.copied_bytes

    def _repeat(self, index: int, totals: tuple[int, dict[str, int], int, int], times: int) -> None:
        """Book what was counted since some totals so many times more."""
        exposed_ns, by_component, copied_ns, copied_bytes = totals
        self.exposed_by_phase[index] += (self.exposed_by_phase[index] - exposed_ns) * times
        for name, value in by_component.items():
            self.exposed_by_component[name] += (self.exposed_by_component[name] - value) * times
        self.copied_ns += (self.copied_ns - copied_ns) * times
        self.copied_bytes += (self.copied_bytes - copied_bytes) * times

    def state(self) -> object:
        """Return everything that decides how it goes on, relative to now."""
        now_ns = self._ready_ns
        return (
            self._ahead - self._position,
            max(0, self._link_ns - now_ns),
            tuple(
                sorted((layer, self._rooms[layer], max(0, end_ns - now_ns)) for layer, end_ns in self._arrivals.items())
            ),
            self._window.state(now_ns),
        )

    def _skip(self, times: int, length: int, duration_ns: int) -> None:
        """Let some equal passes go by."""
        delta_ns = times * duration_ns
        self._ready_ns, self._link_ns = self._ready_ns + delta_ns, self._link_ns + delta_ns
        self._arrivals = {layer: end_ns + delta_ns for layer, end_ns in self._arrivals.items()}
        self._window.shift(delta_ns)
        self._position, self._ahead = self._position + times * length, self._ahead + times * length
        self._passed = {layer: place + times * length for layer, place in self._passed.items()}
        self._yields = deque((place + times * length, amount) for place, amount in self._yields)
