"""One epoch's pen: appends its events to the stream, and keeps an outcome until the next durable write."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from residency.errors import JournalError
from residency.journal.events import Draft, Event, EventType

if TYPE_CHECKING:
    from collections.abc import Sequence

    from residency.journal.store import Journal


class EpochLog:
    """Writes the events of one rank of one epoch.

    An outcome is held back and written in the same transaction as what follows it, the next intent or the
    transition: it is durable before the next effect begins, at half the number of syncs. After the journal
    has failed once nothing more is written, and every later call raises that error again.
    """

    def __init__(self, journal: Journal, *, stream: str, epoch: str, rank: int = 0) -> None:
        self.journal, self.stream, self.epoch, self.rank = journal, stream, epoch, rank
        self.failure: JournalError | None = None
        self._held: list[Draft] = []

    @property
    def usable(self) -> bool:
        """Whether the journal has taken everything so far."""
        return self.failure is None

    def append(self, *drafts: Draft, witness: bool = False) -> tuple[Event, ...]:
        """Write what is held and then the drafts, all or nothing. Raises JournalError."""
        if self.failure is not None:
            raise self.failure
        # Taken before it is written: should an interrupt come after the write, nothing is written a second time.
        held, self._held = self._held, []
        batch: Sequence[Draft] = (*held, *drafts)
        try:
            events = self.journal.append(batch, stream=self.stream, epoch=self.epoch, rank=self.rank, witness=witness)
        except JournalError as error:
            self.failure = error
            raise
        return events[len(batch) - len(drafts) :]

    def hold(self, draft: Draft) -> None:
        """Keep a draft for the next append."""
        self._held.append(draft)

    def note(self, kind: EventType, *, round_number: int, payload: dict[str, Any]) -> None:
        """Append an event that decides nothing; a journal that has failed is passed over in silence."""
        if self.usable:
            try:
                self.append(Draft(type=kind, round=round_number, payload=payload))
            except JournalError:
                return  # `failure` now says it; the caller's own next step must not hang on a remark
