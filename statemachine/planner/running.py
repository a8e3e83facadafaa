"""Requests one after the other as the engine runs them: who has room in the window, and what is on the link."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from residency.statemachine.planner.window_model import WindowModel

if TYPE_CHECKING:
    from residency.statemachine.planner.program import Program, Step
    from residency.statemachine.planner.window_model import Room

LOOKAHEAD_MAX = 512  # uses that the engine looks ahead
_PASSES_MAX = 8  # of a loop that are simulated until its passes repeat themselves, or are taken to


class Run:
    """Requests one after the other. The host runs ahead of the device: rooms are handed out in the order of calls, and
    a copy waits on the link until what was computed in its room has ended.
    """

    def __init__(self, program: Program, window: int) -> None:
        self._program, self._tokens = program, program.tokens
        self._num_tokens = len(program.tokens)
        self._line = program.tokens * 2  # from any place of a request as far as is looked ahead
        self._lookahead = min(LOOKAHEAD_MAX, self._num_tokens)
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
        position, yields, yielded = self._position, self._yields, self._yielded
        while yields and yields[0][0] < position:
            yields.popleft()
            self._is_full = False
        if self._is_full:
            return
        for _, amount in yields:
            yielded = max(yielded, amount)
        program, rooms, take = self._program, self._rooms, self._window.take
        is_held, room_bytes = program.is_held, program.room_bytes
        ahead = max(self._ahead, position)
        shift = position - position % self._num_tokens if self._num_tokens else 0
        # What is looked at is cut out at once: nothing of it changes meanwhile.
        for token in self._line[ahead - shift : position + self._lookahead - shift]:
            if token < 0:
                # What is used after it has to lie where the window stays meanwhile.
                amount = program.amounts[-1 - token]
                yields.append((ahead, amount))
                yielded = max(yielded, amount)
            elif token == running and not is_held[token]:
                break
            elif token in rooms:
                self._passed[token] = ahead
            else:
                found = take(room_bytes[token], yielded=yielded, is_held=is_held[token])
                if found is None:
                    self._is_full = True
                    break
                self._fetch(token, found)
            ahead += 1
        self._ahead = ahead

    def _fetch(self, layer: int, found: tuple[Room, int]) -> None:
        self._rooms[layer], free_ns = found
        link_ns = self._program.link_ns[layer]
        start_ns = self._link_ns
        self._link_ns = self._arrivals[layer] = (max(start_ns, free_ns)) + link_ns
        self.copied_ns += link_ns
        self.copied_bytes += self._program.num_bytes[layer]

    def _take_back(self, layer: int, free_ns: int = 0) -> None:
        """Give the room of a layer back; it is free once what is computed now, and its copy, have ended."""
        self._is_full = False
        self._window.give(self._rooms.pop(layer), max(free_ns, self._ready_ns))
        del self._arrivals[layer]
        position = self._position
        if self._passed.pop(layer, -1) >= position or free_ns:
            shift = position - position % self._num_tokens
            seen = self._line[position - shift : self._ahead - shift]
            if layer in seen:
                self._ahead = place = position + seen.index(layer)
                while self._yields and self._yields[-1][0] >= place:
                    self._yields.pop()

    def _make_way(self) -> None:
        """Empty the blocks of the window that are given back."""
        for layer in [one for one, room in self._rooms.items() if not self._window.stays(room, self._yielded)]:
            self._ready_ns = max(self._ready_ns, self._arrivals[layer])
            self._take_back(layer, self._arrivals[layer])

    def _room_at_once(self, layer: int) -> tuple[Room, int]:
        """Return a room for a layer that was not fetched ahead, at the cost of those that are used latest."""
        wanted, num = self._program.room_bytes[layer], self._num_tokens
        while True:
            found = self._window.take(wanted, yielded=self._yielded, is_held=False)
            if found is not None:
                return found
            if not self._rooms:
                raise ValueError(f"the window has no room for a layer of {wanted} bytes that must run")
            start = self._position % num
            distances = range(self._lookahead - 1, -1, -1)
            # Backwards, so that of each the next use stays.
            expected = dict(zip(self._line[start : start + self._lookahead][::-1], distances, strict=True))
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
