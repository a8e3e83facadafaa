"""What a round asks of the pipeline it works on; whoever owns the torch side implements it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from residency.gpu.records import RequestRecord

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from residency.effects.effect import Effect
    from residency.gpu.placement import Placement
    from residency.gpu.records import DeviceReading, HostReading, LinkReading, RequestKind
    from residency.gpu.specs import ComponentSpec
    from residency.gpu.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One measured request: its record, and a host copy of its output if a tolerance is declared, else None.

    everywhere: whether it succeeded on every other rank, too.
    """

    record: RequestRecord
    output: object
    everywhere: bool = True

    @property
    def succeeded(self) -> bool:
        """Whether it succeeded, on every rank."""
        return self.record.succeeded and self.everywhere


class Worker(Protocol):
    """The pipeline as a round sees it. The round holds it exclusively."""

    @property
    def specs(self) -> tuple[ComponentSpec, ...]:
        """What the pipeline consists of."""
        ...

    @property
    def placement(self) -> Placement:
        """The placement in force."""
        ...

    def measure(self, kind: RequestKind, workload: Workload) -> Measured:
        """Run the warmup once. Out of memory gives a failed record; anything else raises WarmupFailed."""
        ...

    def effects(self, target: Placement) -> tuple[Effect, ...]:
        """Return the effects that lead to the target, releases before growth. Moves nothing."""
        ...

    def commit(self) -> None:
        """Release host copies that the placement in force does not need."""
        ...

    def find_poison(self, error: BaseException) -> str | None:
        """Return what lost the device to this process for good, in one line, judged by an exception; None if not."""
        ...

    def outputs_close(self, first: object, second: object) -> bool:
        """Whether two outputs agree within the tolerance the user declared; False if none was."""
        ...

    def device(self) -> DeviceReading:
        """Return what the device is and the cap in force."""
        ...

    def link(self) -> LinkReading:
        """Measure the link, once."""
        ...

    def host(self) -> HostReading:
        """Read the host's memory now."""
        ...


class Observer(Protocol):
    """Watches a round: progress for people, and fault points for crash tests."""

    def working(self, what: str) -> None:
        """Say what begins now, in a few words."""
        ...

    def leaving(self, state: str) -> None:
        """Called in a state just before the transition out of it is checked and written."""
        ...

    def between_effects(self, index: int) -> None:
        """Called after the intent of an effect is durable and before it is applied."""
        ...


class Interruptible(Protocol):
    """Holds termination signals back while weights move."""

    def deferred(self) -> AbstractContextManager[None]:
        """Enter around what must not be interrupted."""
        ...

    def check(self) -> None:
        """Raise now what was held back, where stopping is safe."""
        ...


class Silent:
    """An observer that says nothing."""

    def working(self, what: str) -> None:
        """Pass over it."""

    def leaving(self, state: str) -> None:
        """Pass over it."""

    def between_effects(self, index: int) -> None:
        """Pass over it."""
