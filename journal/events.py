"""What is written: one event per fact, never changed afterwards."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import msgspec

from residency.errors import JournalCorrupt


class EventType(Enum):
    """Every kind of event. The value is the journal's spelling."""

    EPOCH_STARTED = "epoch.started"  # a worker's life began: fingerprint, initial placement, specs
    PINNED = "pinned"  # the kill switch holds the machine in its initial state
    GATED = "gated"  # a named reason to do nothing
    MEASURED = "measured"  # one request record
    TRANSITION = "transition"  # a state change
    EFFECT_INTENT = "effect.intent"  # before an effect
    EFFECT_OUTCOME = "effect.outcome"  # after it: applied, failed, undone or lost
    ROLLBACK_FAILED = "rollback.failed"  # where the weights are is unknown
    POISONED = "poisoned"  # the device is lost to this process; nothing was moved back
    RECOVERED = "recovered"  # an earlier epoch's open round was closed
    CONTROL = "control"  # a control request and its outcome
    SERVING = "serving"  # the worker is ready, under which placement
    STOPPED = "stopped"  # the worker ended in an orderly way, or by a signal


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """An event before it is written. `payload` must be JSON: objects, lists, text, numbers, booleans, None."""

    type: EventType
    round: int
    payload: dict[str, Any] = field(default_factory=dict)
    from_state: str | None = None
    to_state: str | None = None
    trigger: str | None = None
    causation: str | None = None
    # Placements and other large values that the payload names by digest; stored once.
    blobs: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One journal row.

    position: its number in the journal, from 1. stream_version: its number in its stream, from 1.
    recorded_at: integer ns since the Unix epoch, UTC. causation: the event_id that directly caused it.
    payload: canonical JSON. hash: SHA-256 over all other columns and previous_hash.
    """

    position: int
    stream: str
    stream_version: int
    event_id: str
    epoch: str
    round: int
    rank: int
    type: str
    schema_version: int
    from_state: str | None
    to_state: str | None
    trigger: str | None
    recorded_at: int
    boot_id: str
    pid: int
    causation: str | None
    payload: bytes
    previous_hash: bytes
    hash: bytes


def payload(event: Event) -> dict[str, Any]:
    """Return the event's payload, decoded.

    Raises:
        JournalCorrupt: it is not a JSON object, so the journal was damaged.
    """
    try:
        found = msgspec.json.decode(event.payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        found = error
    if isinstance(found, dict):
        return found
    raise JournalCorrupt(
        journal=f"event {event.position}",
        problem=f"the payload is not a JSON object ({found})",
        remedy="see 'residency verify'",
    )
