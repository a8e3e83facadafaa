"""What `diff` compares: two placements or two rounds, as they are named on the command line."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import msgspec

from residency.cli.explanation import shape_text
from residency.cli.rounds import read_placement
from residency.errors import SettingsError
from residency.gpu.placement import Placement
from residency.gpu.specs import ComponentSpec
from residency.journal.events import EventType, payload
from residency.journal.fold import fold_stream
from residency.journal.views import EpochView, RoundView

if TYPE_CHECKING:
    from collections.abc import Iterator

    from residency.journal.events import Event
    from residency.journal.reader import JournalReader
    from residency.journal.views import StreamView

DIGEST_CHARACTERS_MIN = 4  # of a prefix: as many as git demands
_DIGEST = re.compile(rf"[0-9a-f]{{{DIGEST_CHARACTERS_MIN},64}}")
_COLD = "bounded"  # the kind of a start's first request


class Measured(NamedTuple):
    """Requests of one shape under one placement: how many, and their median time in ns."""

    shape: str
    num_requests: int
    median_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two. round, epoch: where a round was named.

    predicted_ns: what its plan promised for a request, else what the newest plan did that knew the placement.
    """

    label: str
    placement: Placement
    round: RoundView | None = None
    epoch: EpochView | None = None
    predicted_ns: int | None = None
    measured: tuple[Measured, ...] = ()


class Knowledge:
    """What a stream knows of placements: rounds, plans, sizes and measured requests; nothing without a journal."""

    def __init__(self, reader: JournalReader | None, stream: str | None) -> None:
        self._reader = reader
        # (placement, shape, epoch, round) of every measured request that succeeded, cold ones left out -> ns.
        self._times: list[tuple[str, str, str, int, int]] = []
        self.view: StreamView | None = None
        if reader is not None and stream is not None:
            self.view = fold_stream(self._noting(reader.events(stream)), stream)

    def side(self, text: str) -> Side:
        """Return what was named: a round's number, a digest or the unambiguous beginning of one, or an exported file.

        Raises UsageError, and SettingsError for a file that holds no placement.
        """
        if os.sep in text or text.endswith(".json"):
            return self._known(_file_side(text))
        if text.isdecimal() and (found := self._round_side(int(text))) is not None:
            return found
        if _DIGEST.fullmatch(text.lower()):
            return self._known(self._digest_side(text.lower()))
        if os.path.isfile(text):
            return self._known(_file_side(text))
        numbers = f"1 to {self.view.highest_round}" if self.view is not None and self.view.rounds else "none"
        raise click.UsageError(
            f"{text!r} is no round ({numbers}), no digest of at least {DIGEST_CHARACTERS_MIN} characters, and no file"
        )

    def specs(self) -> dict[str, ComponentSpec]:
        """Return component -> its sizes, as the newest life that told them did; empty if none did."""
        for epoch in reversed(self.view.epochs if self.view is not None else ()):
            try:
                found = msgspec.convert(epoch.started.get("specs") or (), tuple[ComponentSpec, ...])
            except (msgspec.ValidationError, ValueError):
                continue  # of another version
            if found:
                return {spec.name: spec for spec in found}
        return {}

    def _noting(self, events: Iterator[Event]) -> Iterator[Event]:
        """Pass events on, and note the measured requests among them."""
        for event in events:
            if event.type == EventType.MEASURED.value:
                self._note(event)
            yield event

    def _note(self, event: Event) -> None:
        record = payload(event).get("record") or {}
        if record.get("succeeded") and record.get("kind") != _COLD:
            shape, digest = shape_text(record["workload"]), str(record.get("placement_digest"))
            self._times.append((digest, shape, event.epoch, event.round, int(record["duration_ns"])))

    def _round_side(self, number: int) -> Side | None:
        found = [
            (epoch, one)
            for epoch in (self.view.epochs if self.view is not None else ())
            for one in epoch.rounds
            if one.number == number
        ]
        if not found:
            return None
        epoch, one = found[-1]
        # A round without a plan ran under what was there before it.
        digest = one.placement or one.previous
        placement = read_placement(self._reader, digest) if self._reader is not None else None
        if placement is None:
            raise click.UsageError(f"round {number} has no placement to compare")
        predicted = ((one.plan or {}).get("prediction") or {}).get("duration_ns")
        side = Side(label=f"round {number}", placement=placement, round=one, epoch=epoch, predicted_ns=predicted)
        measured = self._measured(placement.digest, of_round=(epoch.epoch, number))
        return self._known(replace(side, measured=measured))

    def _digest_side(self, prefix: str) -> Side:
        found = []
        if self._reader is not None:
            found = [(digest, content) for digest, content in self._reader.blobs() if digest.startswith(prefix)]
        if len(found) != 1:
            names = ", ".join(digest[: len(prefix) + 4] for digest, _ in found) or "none"
            raise click.UsageError(f"{prefix!r} must begin the digest of one placement of the journal; found: {names}")
        try:
            return Side(label=f"placement {found[0][0]}", placement=Placement.from_bytes(found[0][1]))
        except (msgspec.MsgspecError, ValueError) as error:
            raise click.UsageError(f"{prefix!r} is no placement that this program knows ({error})") from error

    def _known(self, side: Side) -> Side:
        """Add what the journal knows of its placement, where the side itself does not say."""
        digest = side.placement.digest
        predicted = self._predicted(digest) if side.predicted_ns is None else side.predicted_ns
        return replace(side, predicted_ns=predicted, measured=side.measured or self._measured(digest))

    def _predicted(self, digest: str) -> int | None:
        """Return what the newest plan that knew a placement promised for it: its own choice, or one it weighed."""
        for one in reversed(self.view.rounds if self.view is not None else ()):
            plan: dict[str, Any] = dict(one.plan or {})
            if one.placement == digest and (found := (plan.get("prediction") or {}).get("duration_ns")):
                return int(found)
            for other in plan.get("alternatives") or ():
                if other.get("digest") == digest and other.get("duration_ns"):
                    return int(other["duration_ns"])
        return None

    def _measured(self, digest: str, of_round: tuple[str, int] | None = None) -> tuple[Measured, ...]:
        """Return a placement's measured requests by shape, those measured most often first."""
        times: dict[str, list[int]] = {}
        for placement, shape, epoch, number, duration_ns in self._times:
            if placement == digest and of_round in (None, (epoch, number)):
                times.setdefault(shape, []).append(duration_ns)
        found = (Measured(shape, len(values), round(median(values))) for shape, values in times.items())
        return tuple(sorted(found, key=lambda one: (-one.num_requests, one.shape)))


def _file_side(text: str) -> Side:
    try:
        return Side(label=text, placement=Placement.from_bytes(Path(text).read_bytes()))
    except OSError as error:
        raise SettingsError(f"{text!r} cannot be read: {(error.strerror or str(error)).lower()}", file=text) from error
    except (msgspec.MsgspecError, ValueError) as error:
        raise SettingsError(
            f"{text!r} holds no placement ({error}); write one with manager.export_placement(path)", file=text
        ) from error
