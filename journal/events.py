"""What is written: one event per fact, never changed afterwards."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import msgspec

from residency.errors import JournalCorrupt, JournalNewer
from residency.journal.upcast import SCHEMA_VERSION, upcast


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
    RANKS = "ranks"  # what this rank told the others of its group, or found out about them
    PRUNED = "pruned"  # older events of the stream were removed; says which, and what the chain was around them
    QUARANTINE_CLEARED = "quarantine.cleared"  # an operator forgave what was held against placements so far


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


class Event(NamedTuple):
    """One journal row: its columns, in their order.

    position: its number in the journal, from 1. stream_version: its number in its stream, from 1.
    recorded_at: integer ns since the Unix epoch, UTC. causation: the event_id that directly caused it.
    payload: canonical JSON. hash: SHA-256 over all other columns and previous_hash.
    """

    # A tuple, because a row becomes one in no time: a fold reads a million.
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


# The first events to name a placement are written together with it: (type, trigger) -> the field that names it.
_NAMES_A_BLOB = {
    (EventType.EPOCH_STARTED.value, None): "initial_placement",
    (EventType.TRANSITION.value, "plan"): "placement",
}

_DIGEST = re.compile("[0-9a-f]{64}")


def named_blob(event: Event, content: dict[str, Any]) -> str | None:
    """Return the digest of the blob that was written with the event, if there is one. content: its payload."""
    key = _NAMES_A_BLOB.get((event.type, event.trigger))
    digest = content.get(key) if key is not None else None
    return digest if isinstance(digest, str) and _DIGEST.fullmatch(digest) else None


def payload(event: Event) -> dict[str, Any]:
    """Return the event's payload, decoded, and as an event of the current version would have it.

    Raises:
        JournalNewer: a newer program wrote it, and means by it what this one does not know.
        JournalCorrupt: it is not a JSON object, so the journal was damaged.
    """
    try:
        found = msgspec.json.decode(event.payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        found = error
    if not isinstance(found, dict):
        raise _damaged(event, f"the payload is not a JSON object ({found})")
    if event.schema_version == SCHEMA_VERSION:
        return found
    if event.schema_version > SCHEMA_VERSION:
        raise JournalNewer(journal=f"event {event.position}", found=event.schema_version, known=SCHEMA_VERSION)
    try:
        return upcast(event.type, event.schema_version, found)
    except ValueError as error:
        raise _damaged(event, str(error)) from error


def _damaged(event: Event, problem: str) -> JournalCorrupt:
    return JournalCorrupt(journal=f"event {event.position}", problem=problem, remedy="see 'residency verify'")
