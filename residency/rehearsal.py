"""What the next start of a worker would recover: computed from its events, and not done."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from residency.journal.events import Event
from residency.journal.fold import fold_stream
from residency.statemachine.deaths import digest_of
from residency.statemachine.recovery import closing, decide

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from residency.journal.views import StreamView
    from residency.settings import KillSwitch
    from residency.statemachine.recovery import Closing

# A start draws an id for its epoch; a rehearsal has none, and must not look like a real one.
NEXT_EPOCH = "next-start"


def rehearse(
    events: Sequence[Event], stream: str, *, boot_id: str, now_ns: int, pinned_by: KillSwitch | None
) -> dict[str, Any]:
    """Return what a start on this boot, now, with an unchanged worker would do: the events it closes with, and then
    its decision. Pure; the last epoch is taken to be over.
    """
    closed = closing(fold_stream(events, stream), boot_id=boot_id, now_ns=now_ns, by_epoch=NEXT_EPOCH)
    view = fold_stream([*events, *_written(closed, events[-1], now_ns=now_ns)], stream)
    return {
        "closing": [{"epoch": one.epoch, "types": [draft.type.value for draft in one.drafts]} for one in closed],
        "decision": _decision(view, pinned_by=pinned_by),
    }


def _written(closed: Sequence[Closing], last: Event, *, now_ns: int) -> Iterator[Event]:
    """Yield the closing events as the journal would give them back; hashes are left out, nothing reads them."""
    position = last.position
    for one in closed:
        for draft in one.drafts:
            position += 1
            yield Event(
                position=position,
                stream=last.stream,
                stream_version=last.stream_version + position - last.position,
                event_id=f"{NEXT_EPOCH}-{position}",
                epoch=one.epoch,
                round=draft.round,
                rank=one.rank,
                type=draft.type.value,
                schema_version=last.schema_version,
                from_state=draft.from_state,
                to_state=draft.to_state,
                trigger=draft.trigger,
                recorded_at=now_ns,
                boot_id=last.boot_id,
                pid=last.pid,
                causation=draft.causation,
                payload=msgspec.json.encode(draft.payload),
                previous_hash=b"",
                hash=b"",
            )


def _decision(view: StreamView, *, pinned_by: KillSwitch | None) -> dict[str, Any]:
    if pinned_by is not None:
        return {"kind": "pinned", "reason": f"{pinned_by.by} is {pinned_by.value!r}", "placement": None, "round": None}
    last = view.epochs[-1]
    initial = str(last.started.get("initial_placement", ""))
    decision = decide(view, fingerprint=last.fingerprint, fingerprint_digest=digest_of(last), initial=initial)
    return {
        "kind": decision.kind.value,
        "reason": decision.reason,
        "placement": decision.placement,
        "round": decision.round.number if decision.round is not None else None,
        "reserve_factor": decision.reserve_factor,
        "excluded": list(decision.excluded),
    }
