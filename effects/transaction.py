"""All effects of a round, or none: what was applied is undone in reverse, unless the device itself is lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from residency.effects.spec import EffectSpec
from residency.errors import EffectFailed, ProcessPoisoned, RollbackFailed, describe

if TYPE_CHECKING:
    from residency.effects.effect import Effect

# (what, is it an undo) just before; (what, "applied" | "failed" | "undone", error or None, ns) just after.
OnIntent = Callable[[EffectSpec, bool], None]
OnOutcome = Callable[[EffectSpec, str, BaseException | None, int], None]
# What lost the device to this process, judged by an exception, in one line; None if it was not.
FindPoison = Callable[[BaseException], str | None]

# An interrupt can cut an undo short, and a second one the second attempt; a third is no accident.
UNDO_ATTEMPTS_MAX = 3


class Transaction:
    """Applies effects in order, telling of each before and after. For one round, on one thread.

    Once an exception says, by `find_poison`, that the device is lost, nothing is applied, undone or told any more: on a
    broken context an undo can only do harm, and where its component is nobody knows, so its intent stays in doubt.

    untold: what callbacks raised while effects were being undone, which nothing may stop.
    """

    def __init__(
        self,
        effects: Sequence[Effect],
        *,
        on_intent: OnIntent,
        on_outcome: OnOutcome,
        find_poison: FindPoison,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._effects = tuple(effects)
        self._on_intent, self._on_outcome, self._find_poison = on_intent, on_outcome, find_poison
        self._clock_ns = clock_ns
        self._started: list[Effect] = []
        self._applied: set[int] = set()
        self.untold: list[BaseException] = []

    @property
    def num_effects(self) -> int:
        """How many effects there are to apply."""
        return len(self._effects)

    def apply(self) -> None:
        """Check every effect, then apply each between its intent and its outcome.

        On any exception, also one of the callbacks, everything is undone. Then raises EffectFailed from the cause;
        what is no Exception (an interrupt, an exit) as it is; RollbackFailed if something could not be undone. If the
        device is lost, nothing is undone, and it raises ProcessPoisoned.
        """
        current: EffectSpec | None = None
        try:
            for effect in self._effects:
                current = effect.spec
                effect.check()
            for effect in self._effects:
                current = effect.spec
                self._apply(effect)
        except BaseException as error:
            self._stop_if_poisoned(error)
            self.revert()
            if current is None or not isinstance(error, Exception):
                raise
            action = f"the move from {current.before.mode.value} to {current.after.mode.value}"
            problem = describe(error)
            raise EffectFailed(component=current.component, action=action, problem=problem) from error

    def revert(self) -> None:
        """Undo in reverse what was applied; a second call is a no-op. Callbacks that raise are passed over.

        Every undo is attempted, unless one finds the device lost, which raises ProcessPoisoned. Raises RollbackFailed
        with all problems; then an interrupt that came meanwhile.
        """
        problems: list[str] = []
        interrupts: list[BaseException] = []
        while self._started:
            effect = self._started[-1]
            problem = self._undo(effect, interrupts)
            self._applied.discard(id(effect))
            self._started.pop()
            if problem is not None:
                problems.append(f"{effect.spec.component}: {type(problem).__name__}: {problem}")
        if problems:
            # Which round it is, only the round knows; it raises this again with its number.
            raise RollbackFailed(round_number=0, problems=tuple(problems))
        if interrupts:
            raise interrupts[0]

    def _apply(self, effect: Effect) -> None:
        self._on_intent(effect.spec, False)
        started_ns = self._clock_ns()
        try:
            # Booked first: an interrupt right after the last step of `apply` must not hide that it was done.
            self._started.append(effect)
            effect.apply()
            self._applied.add(id(effect))
        except BaseException as error:
            self._stop_if_poisoned(error)
            spent_ns, failure = self._clock_ns() - started_ns, error
            self._tell(lambda: self._on_outcome(effect.spec, "failed", failure, spent_ns))
            raise
        self._on_outcome(effect.spec, "applied", None, self._clock_ns() - started_ns)

    def _undo(self, effect: Effect, interrupts: list[BaseException]) -> BaseException | None:
        """Take one effect back and tell of it, unless it never applied: then make sure, without a word."""
        is_told = id(effect) in self._applied
        if is_told:
            interrupts += self._tell(lambda: self._on_intent(effect.spec, True))
        started_ns = self._clock_ns()
        problem = _revert(effect, interrupts)
        if problem is not None:
            self._stop_if_poisoned(problem)
        spent_ns = self._clock_ns() - started_ns
        if is_told:
            result = "undone" if problem is None else "failed"
            interrupts += self._tell(lambda: self._on_outcome(effect.spec, result, problem, spent_ns))
        return problem

    def _stop_if_poisoned(self, error: BaseException) -> None:
        """Raise ProcessPoisoned if an exception says that the device is lost, and leave everything as it is."""
        if isinstance(error, ProcessPoisoned):
            raise error
        problem = self._find_poison(error)
        if problem is not None:
            self._started.clear()  # for good: `revert` finds nothing to undo
            raise ProcessPoisoned(round_number=0, problem=problem) from error

    def _tell(self, callback: Callable[[], None]) -> list[BaseException]:
        """Call back; keep what it raises, and return it if it is an interrupt."""
        try:
            callback()
        except BaseException as error:  # noqa: BLE001 - nothing may stop an undo
            self.untold.append(error)
            return [] if isinstance(error, Exception) else [error]
        return []


def _revert(effect: Effect, interrupts: list[BaseException]) -> BaseException | None:
    problem: BaseException | None = None
    for _ in range(UNDO_ATTEMPTS_MAX):
        try:
            effect.revert()
        except Exception as error:  # noqa: BLE001 - nothing may stop an undo
            return error
        except BaseException as error:  # noqa: BLE001 - nothing may stop an undo
            problem = error
            interrupts.append(error)
        else:
            return None
    return problem
