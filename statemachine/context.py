"""What every round of an epoch shares: the worker, the journal, the policy, and what may stop it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from residency.gpu.placement import Placement
from residency.gpu.workload import Workload
from residency.statemachine.epoch_log import EpochLog
from residency.statemachine.policy import Policy
from residency.statemachine.ranks import Alone
from residency.statemachine.worker import Interruptible, Observer, Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundContext:
    """Shared by the rounds of one epoch.

    workload: the default request shape; workloads: others that must fit as well. initial: the initial placement.
    configured: component -> why it is fixed.
    switch: returns the kill switch that is on, or None; asked at every trigger. clock: monotonic ns.
    is_identified: whether the weights' content is known, so that a restore may compare outputs. ranks: the others of
    this worker.
    """

    worker: Worker
    log: EpochLog
    policy: Policy
    workload: Workload
    initial: Placement
    configured: Mapping[str, str]
    fingerprint_digest: str
    is_identified: bool
    switch: Callable[[], object | None]
    interrupts: Interruptible
    observer: Observer
    clock: Callable[[], int]
    ranks: Alone = field(default_factory=Alone)
    workloads: tuple[Workload, ...] = ()
