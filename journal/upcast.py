"""Brings payloads of older events to what this program reads: on the way out of the journal, which stays as it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

# Of what this program writes, and reads without help. A change of what a payload means raises it, and brings a step
# for every type that it concerns; a field that is only added does not.
SCHEMA_VERSION = 1

# (type, schema_version) -> what makes of such a payload one of the next version. A type without a step means the same
# in both. Steps are never changed once released: journals that need them exist.
UPCASTERS: dict[tuple[str, int], Callable[[dict[str, Any]], dict[str, Any]]] = {}


def upcast(kind: str, schema_version: int, content: dict[str, Any]) -> dict[str, Any]:
    """Return the payload of an event as an event of the current version would have it. Pure.

    Raises:
        ValueError: it is of a version that this program does not know, or a step finds what it cannot read.
    """
    if not 0 <= schema_version <= SCHEMA_VERSION:
        raise ValueError(f"version {schema_version} of a payload is not one that this program knows")
    for version in range(schema_version, SCHEMA_VERSION):
        step = UPCASTERS.get((kind, version))
        if step is not None:
            try:
                content = step(content)
            except (KeyError, TypeError, AttributeError, IndexError) as error:
                raise ValueError(f"a payload of version {version} cannot be read ({error!r})") from error
    return content
