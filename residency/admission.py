"""Requests of shapes that a placement was not made for: noticed, counted, and treated as the worker wants."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from residency.errors import EffectFailed, JournalError, OutsideEnvelope, PlacementInfeasible, SettingsError
from residency.gpu.workload import Workload, shape_of_call
from residency.statemachine.planner.envelope import Envelope, Outside, Standing, envelope_of
from residency.statemachine.planner.hint import Hint, hint_for
from residency.statemachine.planner.replanning import journaled_inputs
from residency.statemachine.source import Source, SourceKind
from residency.statemachine.states import State

if TYPE_CHECKING:
    from collections.abc import Callable

    from residency.epoch import Epoch
    from residency.gpu.placement import Placement
    from residency.statemachine.planner.plan import PlanInputs
    from residency.statemachine.source import RoundResult

log = logging.getLogger(__name__)

_TRIED_MAX = 64  # shapes that were calibrated for in vain; their requests are refused without another attempt


class Admission:
    """Looks at the shape of every request that has one. counts: what was done about those that were not measured."""

    def __init__(
        self, epoch: Epoch, outside: Outside, *, run: Callable[[Callable[[], RoundResult]], RoundResult]
    ) -> None:
        self._epoch, self._outside, self._run = epoch, outside, run
        self.counts: dict[str, int] = dict.fromkeys(("extrapolated", "allowed", "refused", "recalibrated"), 0)
        self._digest: str | None = None  # of the placement that `_basis` is of
        self._basis: tuple[PlanInputs, Envelope] | None = None
        self._tried: dict[int, None] = {}
        self._has_warned = False

    @property
    def envelope(self) -> Envelope | None:
        """The shapes that the placement in force is good for; None if it was not planned from measurements."""
        return None if self._basis is None else self._basis[1]

    def look(self) -> None:
        """Find out what the placement in force was planned from, once for each placement. Reads the journal."""
        placement = self._epoch.setup.worker.placement
        if self._digest != placement.digest:
            self._digest, self._basis = placement.digest, None
            found = self._planned(placement.digest)
            if found is not None:
                inputs, was_validated = found
                self._basis = inputs, _envelope(inputs, placement, was_validated=was_validated)

    def admit(self, asked: object) -> None:
        """Count a request that was not measured; let it pass, refuse it, or calibrate for it first.

        asked: its shape, or the arguments of a pipeline's call. None, and whatever tells no shape, passes. Raises
        OutsideEnvelope, PipelineBusy while somebody else has the pipeline, RollbackFailed, ProcessPoisoned.
        """
        default = self._epoch.setup.workload
        shape = shape_of_call(asked, default) if isinstance(asked, Mapping) and default is not None else asked
        envelope = self.envelope if isinstance(shape, Workload) else None
        if not isinstance(shape, Workload) or envelope is None:
            return
        standing = envelope.standing(shape)
        if standing is Standing.EXTRAPOLATED:
            self.counts["extrapolated"] += 1
        if standing is not Standing.OUTSIDE:
            return
        if self._outside is Outside.RECALIBRATE and self._recalibrate(shape):
            self.counts["recalibrated"] += 1
        elif self._outside is Outside.ALLOW:
            self.counts["allowed"] += 1
            if not self._has_warned:
                self._has_warned = True
                log.warning(
                    "a request of %s is larger than anything that was measured; it may run out of memory", shape
                )
        else:
            self.counts["refused"] += 1
            raise OutsideEnvelope(units=shape.units, units_max=envelope.units_max)

    def hint(self, shape: Workload) -> Hint:
        """Return how placements rank for a shape, estimated. Raises SettingsError if nothing was measured here."""
        if self._basis is None:
            raise SettingsError(
                "a hint needs measurements, and the placement in force was not planned; calibrate first"
            )
        inputs, envelope = self._basis
        return hint_for(inputs, self._epoch.setup.worker.placement, envelope, shape)

    def status(self) -> dict[str, Any]:
        """Return policy, counts, and the envelope as JSON values."""
        envelope = self.envelope
        told = None if envelope is None else msgspec.to_builtins(envelope)
        return {"policy": self._outside.value, "counts": dict(self.counts), "envelope": told}

    def _planned(self, digest: str) -> tuple[PlanInputs, bool] | None:
        """Return what a placement was planned from last, and whether its shapes were run under it then."""
        if self._epoch.log is None:
            return None  # It has been said why there is no journal any more.
        try:
            rounds = self._epoch.remembered()
        except JournalError as error:
            log.warning("nothing is known about the shapes that the placement holds for: %s", error)
            return None
        for one in reversed(rounds):
            if one.placement == digest and (found := journaled_inputs(one.plan)) is not None:
                return found, (one.outcome or {}).get("verdict") is not None
        return None

    def _recalibrate(self, shape: Workload) -> bool:
        """Say whether a round for one more shape ended with a placement that holds for it."""
        epoch = self._epoch
        if any(units <= shape.units for units in self._tried):
            return False
        before = epoch.setup
        larger = replace(shape, steps=before.workload.steps) if before.workload is not None else shape
        epoch.setup = replace(before, workloads=(*before.workloads, larger))
        excluded = epoch.recovery.excluded if epoch.recovery is not None else ()
        state = None
        try:
            result = self._run(lambda: epoch.run_round(Source(kind=SourceKind.CALIBRATION, excluded=excluded)))
            state = result.state
        except (EffectFailed, JournalError, PlacementInfeasible) as error:
            log.warning("calibrating for %s failed: %s", shape, error)
        finally:
            if state is not State.COMMITTED:
                epoch.setup = before
        self._digest = None
        self.look()
        envelope = self.envelope
        is_inside = envelope is not None and envelope.standing(shape) is not Standing.OUTSIDE
        if not is_inside and len(self._tried) < _TRIED_MAX:
            self._tried[shape.units] = None
        return is_inside


def _envelope(inputs: PlanInputs, placement: Placement, *, was_validated: bool) -> Envelope:
    """Return the envelope of a placement that was committed, with the default shape, and what else it was run with."""
    found = envelope_of(inputs, placement)
    planned = (inputs.workload, *(inputs.workloads if was_validated else ()))
    measured = sorted(dict.fromkeys((*found.measured, *planned)), key=lambda one: one.units)
    return Envelope(measured=tuple(measured), units_max=max([found.units_max, *(one.units for one in planned)]))
