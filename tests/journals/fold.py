"""How the fold of a journal is written down beside it, for people and for comparison."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import msgspec

from residency.journal.fold import fold

if TYPE_CHECKING:
    from residency.journal.reader import JournalReader

# Characters of a value in a payload; a longer one is told by its digest, so that a person can read the rest.
VALUE_SHOWN = 300

PAYLOADS = frozenset({"started", "plan", "outcome", "before", "after"})


def folded(reader: JournalReader) -> str:
    """Return every stream, folded, as JSON for people."""
    views = {name: msgspec.to_builtins(view) for name, view in fold(reader.events()).items()}
    return json.dumps(brief(views), indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def brief(value: Any) -> Any:
    """Return the value with what is long in its payloads replaced by a digest."""
    if isinstance(value, dict):
        return {name: _brief_payload(one) if name in PAYLOADS else brief(one) for name, one in value.items()}
    return [brief(one) for one in value] if isinstance(value, (list, tuple)) else value


def _brief_payload(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    texts = {name: json.dumps(one, sort_keys=True) for name, one in value.items()}
    return {
        name: value[name]
        if len(text) <= VALUE_SHOWN
        else f"{len(text)} characters, SHA-256 {hashlib.sha256(text.encode()).hexdigest()}"
        for name, text in texts.items()
    }
