"""The pipeline as a round sees it: measured requests, effects, readings."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from residency.effects.place import PlaceComponent, growth_room, order_effects
from residency.effects.spec import EffectSpec
from residency.effects.transaction import Transaction
from residency.errors import EffectFailed, PlacementInfeasible, SettingsError
from residency.gpu.device import is_out_of_memory
from residency.gpu.host_memory import booked_against_kernel, read_host, trim
from residency.gpu.measure import measure_request
from residency.gpu.output import flatten_output, outputs_close
from residency.gpu.poison import find_poison
from residency.statemachine.worker import Measured

if TYPE_CHECKING:
    from collections.abc import Callable

    from residency.effects.effect import Effect
    from residency.gpu.pipeline import ManagedPipeline
    from residency.gpu.placement import Placement
    from residency.gpu.records import DeviceReading, HostReading, LinkReading, RequestKind
    from residency.gpu.specs import ComponentSpec
    from residency.gpu.workload import Workload


class PipelineWorker:
    """Implements statemachine's Worker over a managed pipeline and the user's warmup."""

    def __init__(
        self,
        pipeline: ManagedPipeline,
        *,
        warmup: Callable[[Workload], object] | None,
        target_steps: int,
        host_ram_bytes: int | None = None,
        num_local_ranks: int = 1,
        tolerance: float | None = None,
    ) -> None:
        self.pipeline = pipeline
        self._warmup, self._target_steps = warmup, target_steps
        self._host_ram_bytes, self._tolerance = host_ram_bytes, tolerance
        self._num_local_ranks = num_local_ranks
        self._specs = pipeline.specs
        self._pins_refused = False

    @property
    def specs(self) -> tuple[ComponentSpec, ...]:
        """What the pipeline consists of, as it was found."""
        return self._specs

    @property
    def placement(self) -> Placement:
        """The placement in force."""
        return self.pipeline.placement

    def measure(self, kind: RequestKind, workload: Workload) -> Measured:
        """Run the warmup once. Out of memory gives a failed record; anything else raises WarmupFailed."""
        warmup = self._warmup
        assert warmup is not None, "the gate lets no round through without a warmup"
        record, output = measure_request(
            self.pipeline, lambda: warmup(workload), kind=kind, workload=workload, target_steps=self._target_steps
        )
        # An output kept on the device would count in every later peak.
        return Measured(record=record, output=None if self._tolerance is None else self._on_host(output))

    def effects(self, target: Placement) -> tuple[Effect, ...]:
        """Return the effects that lead to the target, releases before growth. Moves nothing."""
        now = self.placement
        changes = (
            EffectSpec(index=0, component=name, before=now.components[name], after=target.components[name])
            for name in now.changes_to(target)
        )
        growth_bytes = growth_room(self, now, self.device().cap_bytes)
        ordered = order_effects(changes, self, growth_bytes=growth_bytes)
        return tuple(PlaceComponent(self.pipeline, spec) for spec in ordered)

    def commit(self) -> None:
        """Release host copies that the placement in force does not need, and give their memory back to the system."""
        self.pipeline.commit()
        trim()

    def place(self, target: Placement) -> None:
        """Go to a placement outside any round: the initial one, before there is anything to go back to.

        Raises PlacementInfeasible if device memory runs out, SettingsError if the host refuses to page-lock what a
        placement file asks for, both with the weights as they were found; RollbackFailed if they are not;
        ProcessPoisoned if the device is lost to this process.
        """
        effects = self.effects(target)
        try:
            Transaction(effects, on_intent=lambda *_: None, on_outcome=lambda *_: None, find_poison=find_poison).apply()
        except EffectFailed as error:
            cause = error.__cause__
            if isinstance(cause, MemoryError):
                raise SettingsError(
                    f"{error}; raise the limit on locked memory, or configure no pinned tier"
                ) from error
            if cause is None or not is_out_of_memory(cause):
                raise
            needed = sum(one.device_bytes(target.components[one.name], in_use=False) for one in self.specs)
            raise PlacementInfeasible(
                needed_bytes=needed,
                cap_bytes=self.device().cap_bytes,
                bound_by="the initial placement (modes=)",
            ) from error
        self.pipeline.commit()

    def find_poison(self, error: BaseException) -> str | None:
        """Return what lost the device to this process for good, in one line, judged by an exception; None if not."""
        return find_poison(error)

    def refuse_pins(self) -> None:
        """Plan without page-locked host memory for the rest of this life: the host refuses it."""
        self._pins_refused = True

    def outputs_close(self, first: object, second: object) -> bool:
        """Whether two outputs agree within the tolerance the user declared; False if none was."""
        if self._tolerance is None or first is None or second is None:
            return False
        with self.pipeline.device.moving():
            return outputs_close(first, second, self._tolerance)

    def _on_host(self, output: object) -> object:
        if output is None:
            return None
        with self.pipeline.device.moving():
            return [array.clone() for array in flatten_output(output)]

    def device(self) -> DeviceReading:
        """Return what the device is and the cap in force."""
        return self.pipeline.device.reading()

    def link(self) -> LinkReading:
        """Measure the link, once."""
        return self.pipeline.device.measure_link()

    def host(self) -> HostReading:
        """Read the host's memory now; a declared host_ram bounds what may be pinned."""
        reading = read_host(host_ram_bytes=self._host_ram_bytes, num_local_ranks=self._num_local_ranks)
        return replace(reading, pin_budget_bytes=0) if self._pins_refused else reading

    def memory_figures(self) -> dict[str, Any]:
        """Return what is booked of host and device beside what kernel and allocator say, for the journal. Read-only."""
        pipeline = self.pipeline
        memory, host = pipeline.device.memory(), booked_against_kernel(pipeline.host_bytes)
        return {
            "host_memory": {**asdict(host), "pinned_bytes": pipeline.pinned_bytes},
            "device_memory": {
                "window_bytes": pipeline.window_bytes,
                "allocated_bytes": memory.allocated_bytes,
                "reserved_bytes": memory.reserved_bytes,
            },
        }
