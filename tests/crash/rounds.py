"""Lives of workers that are killed at random, one after the other, and what the next ones do."""

from __future__ import annotations

import os
import random
import shutil
from typing import TYPE_CHECKING, Any

from residency.errors import ResidencyError
from residency.journal.events import EventType, payload
from residency.journal.reader import JournalReader
from residency.journal.verify import verify
from tests.crash.cases import Found, Server, acknowledged
from tests.crash.shim import CHANGES, EVERYTHING, Action

if TYPE_CHECKING:
    from pathlib import Path

    from residency.journal.events import Event

# Deaths of workers on one journal, before one is left in peace: planning stops after the second that a plan is blamed
# for, and the ones after that die in what is done then.
KILLS_A_JOURNAL = 3

# Of all kills; the others come at a call on the journal's files.
SHARE_BY_CLOCK = 0.25


class Rounds:
    """Starts workers on journals of their own, in a folder."""

    def __init__(self, folder: Path, library: Path) -> None:
        self._folder, self._number = folder, 0
        folder.mkdir(exist_ok=True)
        os.environ["XDG_STATE_HOME"] = str(folder / "state")
        self._server = Server("tests.crash.rounds_server", library)
        self._committed = self._fresh()
        first = self._server.ask(journal=str(self._committed), kinds=int(CHANGES))["said"][-1]
        again = self._server.ask(journal=str(self._fresh(self._committed)), kinds=int(CHANGES))["said"][-1]
        assert (first["answer"]["decision"], again["answer"]["decision"]) == ("committed", "restored")
        self.output, self.num_calls = str(first["answer"]["output"]), int(first["calls"])
        # Of a restore alone, and of a calibration with what only reads.
        self.num_calls_restoring = int(again["calls"])
        all_calls = self._server.ask(journal=str(self._fresh()), kinds=int(EVERYTHING))["said"][-1]["calls"]
        self.num_calls_at_all = int(all_calls)
        self._ready_s = float(first["answer"]["ready_ms"]) / 1e3

    def close(self) -> None:
        """End the process that starts workers."""
        self._server.close()

    def killed(self, number: int, *, mutation: str = "") -> tuple[int, Found]:
        """Kill workers on one journal at moments that the number draws; returns how many died, and what was found."""
        rng = random.Random(number)
        is_restore = rng.random() < 0.5
        journal = self._fresh(self._committed if is_restore else None)
        num_calls = self.num_calls_restoring if is_restore else self.num_calls
        found, known, num_killed = Found(), _known(journal), 0
        for turn in range(KILLS_A_JOURNAL + 1):
            fault: dict[str, Any] = {}
            if turn < KILLS_A_JOURNAL and rng.random() < SHARE_BY_CLOCK:
                fault = {"after_s": rng.uniform(0.0, 1.2 * self._ready_s)}
            elif turn < KILLS_A_JOURNAL:
                action = rng.choice([Action.KILL_BEFORE, Action.KILL_AFTER, Action.KILL_HALFWAY])
                fault = {"kinds": int(CHANGES), "action": int(action), "at": rng.randrange(1, num_calls + 1)}
            answer = self._server.ask(journal=str(journal), mutation=mutation, **fault)
            num_killed += answer["status"] == -9
            known = self._look(journal, known, answer, found)
        self._discard(journal)
        return num_killed, found

    def failed(self, *, at: int, error: int, sticky: bool) -> Found:
        """Have a call of a calibration fail, or all from there on: the worker serves all the same."""
        journal, found = self._fresh(), Found()
        fault = {"kinds": int(EVERYTHING), "action": int(Action.FAIL), "at": at, "error": error, "sticky": sticky}
        answer = self._server.ask(journal=str(journal), **fault)
        known = self._look(journal, [], answer, found)
        if answer["status"] != 0:
            found.problems.append(f"the worker ended with {answer['status']}: {answer['said'][-1:]}")
        self._look(journal, known, self._server.ask(journal=str(journal)), found)
        found.problems += [f"{name} was set aside" for name in os.listdir(journal.parent) if ".corrupt-" in name]
        self._discard(journal)
        return found

    def _look(self, journal: Path, known: list[list[Any]], answer: dict[str, Any], found: Found) -> list[list[Any]]:
        """Compare a journal with what its workers were told; returns all that is known of it now."""
        said = answer["said"]
        found.problems += [str(one["unexpected"]) for one in said if "unexpected" in one]
        if answer["status"] not in (0, -9) and answer["said"]:
            found.problems += [str(one["error"]) for one in said if "error" in one]
        told = [*known, *acknowledged(said)]
        try:
            events = _events(journal)
        except ResidencyError as error:
            # It may have died before there was one.
            if told:
                found.lost += len(told)
                found.problems.append(str(error))
            return told
        there = [[event.position, event.hash.hex()] for event in events]
        missing = [one for one in told if one not in there]
        if missing:
            found.lost += len(missing)
            found.problems.append(f"{len(missing)} acknowledged events are not there: {missing[:3]}")
        with JournalReader.open(journal) as reader:
            found.problems += [f"verify: {one.text}" for one in verify(reader) if not one.is_note]
        self._compare_effects(events, known, said, found)
        for one in said:
            if "answer" in one:
                self._compare_placement(events, one["answer"], found)
        return there

    def _compare_effects(
        self, events: list[Event], known: list[list[Any]], said: list[dict[str, Any]], found: Found
    ) -> None:
        """Every effect that was begun has its intent in the journal: this life's."""
        begun = sum("effect" in one for one in said)
        last = known[-1][0] if known else 0
        intents = sum(event.type == EventType.EFFECT_INTENT.value for event in events if event.position > last)
        if begun > intents:
            found.unannounced += begun - intents
            found.problems.append(f"{begun} effects were begun, and {intents} were announced")

    def _compare_placement(self, events: list[Event], answer: dict[str, Any], found: Found) -> None:
        """What is served is what was committed last, or what is served without a commit; and the output is the same."""
        commits = [payload(event)["placement"] for event in events if event.to_state == "committed"]
        initials = {payload(event)["initial_placement"] for event in events if event.type == "epoch.started"}
        served, decision = answer["placement_digest"], answer["decision"]
        allowed = {*commits[-1:]} if decision in ("committed", "restored", "kept") else {*initials, *commits[-1:]}
        # Without a journal that works nothing is restored, and nothing is known of the initial one either.
        if (served not in allowed and events) or answer["output"] != self.output:
            found.wrong_placements += 1
            found.problems.append(f"{decision}: serves {served[:8]}, of {[one[:8] for one in allowed]}")

    def _fresh(self, template: Path | None = None) -> Path:
        self._number += 1
        folder = self._folder / str(self._number)
        folder.mkdir()
        for suffix in ("", ".head", "-wal") if template is not None else ():
            source = f"{template}{suffix}"
            if os.path.exists(source):
                shutil.copy(source, folder / f"journal.db{suffix}")
        return folder / "journal.db"

    def _discard(self, journal: Path) -> None:
        shutil.rmtree(journal.parent)


def _events(journal: Path) -> list[Event]:
    with JournalReader.open(journal) as reader:
        return list(reader.events())


def _known(journal: Path) -> list[list[Any]]:
    return [[event.position, event.hash.hex()] for event in _events(journal)] if journal.exists() else []
