"""Every number that a decision depends on, with its reason."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 2**20
GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The numbers behind measuring, planning, validation and recovery; journaled with every plan.

    Raises ValueError if one of them could not have been meant.
    """

    # Measuring.
    image_area_max: int = 768 * 768  # a first, cold request stays small: seconds, on any model
    video_area_max: int = 832 * 480
    video_frames_max: int = 17  # 8k + 1 and 4k + 1, the frame counts video models take
    step_floor: int = 4  # one compile-heavy step, one boundary step, two steady ones
    probe_margin_bytes: int = 1 * GIB  # allocator slack only: a planner's reserve here would shrink good probes
    probe_margin_fraction: float = 0.02  # of the cap, on cards where that is more
    activation_margin: float = 1.2  # on what is extrapolated beside weights; weights are exact

    # Planning.
    reserve_measured_bytes: int = 256 * MIB  # allocations that one measured request may have missed
    reserve_cap_divisor: int = 16  # no fixed reserve or margin above this part of the cap: small devices count too
    reserve_extrapolated_fraction: float = 0.10  # of the cap, where the target shape was never measured
    equal_fraction_max: float = 0.01  # of a request: more time than that is never traded for memory, however noisy
    noticeable_fraction: float = 0.01  # of a request: a smaller gain is no advice to anybody
    busy_slowdown: float = 0.03  # of computing, while a copy runs beside it: 2.8 % was measured on one H200
    num_slots: int = 2  # of streamed layers: one computes while the next one comes
    byte_levels: int = 128  # placements of one component are told apart by this part of all weights, or by a layer
    window_levels: int = 4  # window sizes that are weighed between the least and the largest
    solver_nodes_max: int = 20_000  # partial placements that are bounded: about half a second
    simulations_max: int = 64  # complete placements that are simulated: about half a second

    # Validation.
    samples_max: int = 5
    samples_for_noise_min: int = 3  # fewer say nothing about spread
    sample_budget_s: float = 30.0  # a side; at least one sample is always taken
    slower_fraction: float = 0.05
    slower_min_ms: float = 20.0  # below it a host scheduler decides, not a placement
    noise_factor: float = 3.0
    noise_unknown_fraction: float = 0.05  # of the baseline, with too few samples

    replans_max: int = 3  # where nothing runs at all: other placements tried before a start gives up

    # Waiting.
    journal_wait_s: float = 10.0  # for other writers; the longest append seen with eight of them was 1.1 s
    busy_wait_s: float = 30.0  # for requests in flight, before a round is refused as busy
    request_wait_s: float = 600.0  # of a request, for a round in progress

    # Recovery.
    deaths_max: int = 2  # blamed so often, a placement is quarantined, and planning stops for a fingerprint
    serving_deaths_in_a_row: int = 3
    serving_death_window_s: float = 600.0  # later deaths say nothing about the placement
    suspect_reserve_factor: float = 2.0

    def __post_init__(self) -> None:
        whole = (
            "image_area_max video_area_max video_frames_max step_floor reserve_cap_divisor num_slots byte_levels "
            "window_levels solver_nodes_max simulations_max samples_max samples_for_noise_min deaths_max "
            "serving_deaths_in_a_row"
        )
        for name in whole.split():
            if getattr(self, name) < 1:
                raise ValueError(f"policy {name} is {getattr(self, name)!r}; it must be at least 1")
        if self.activation_margin < 1 or self.suspect_reserve_factor < 1:
            raise ValueError("policy activation_margin and suspect_reserve_factor must be at least 1")
        if not 0 <= self.reserve_extrapolated_fraction * self.suspect_reserve_factor < 1:
            # A suspect's larger reserve must leave some of the cap.
            raise ValueError(
                f"policy reserve_extrapolated_fraction is {self.reserve_extrapolated_fraction!r}; "
                f"times suspect_reserve_factor ({self.suspect_reserve_factor!r}) it must be under 1"
            )
        if min(self.reserve_measured_bytes, self.probe_margin_bytes) < 0:
            raise ValueError("policy reserve_measured_bytes and probe_margin_bytes must not be negative")

    def measured_reserve(self, cap_bytes: int) -> int:
        """Return the bytes kept free beside a phase that was measured at the target shape."""
        return min(self.reserve_measured_bytes, cap_bytes // self.reserve_cap_divisor)

    def extrapolated_reserve(self, cap_bytes: int) -> int:
        """Return the bytes kept free where the target shape was not measured."""
        return int(cap_bytes * self.reserve_extrapolated_fraction)

    def probe_margin(self, cap_bytes: int) -> int:
        """Return the bytes that a probe is expected to leave free."""
        wanted = max(self.probe_margin_bytes, int(cap_bytes * self.probe_margin_fraction))
        return min(wanted, cap_bytes // self.reserve_cap_divisor)
