"""The picture of the state machine, generated from its table."""

from __future__ import annotations

from residency.statemachine.states import INITIAL, TRANSITIONS, State


def mermaid() -> str:
    """Return the machine as a mermaid state diagram, one arrow per row of the table; ends with a newline."""
    lines = ["stateDiagram-v2"]
    # A hyphen is no part of a mermaid identifier.
    lines += [f'    state "{state.value}" as {_identifier(state)}' for state in State if "-" in state.value]
    lines.append(f"    [*] --> {_identifier(INITIAL)}")
    lines += [
        f"    {_identifier(source)} --> {_identifier(target)}: {trigger.value}"
        for trigger, source, target in TRANSITIONS
    ]
    return "\n".join(lines) + "\n"


def _identifier(state: State) -> str:
    return state.value.replace("-", "_")
