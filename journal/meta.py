"""What a journal says about itself, in its table `meta`: the keys, and the digest that covers them."""

from __future__ import annotations

import hashlib
import uuid
from typing import TYPE_CHECKING

from residency.journal.encode import canonical_json

if TYPE_CHECKING:
    from collections.abc import Mapping

# SHA-256 of all other rows. Journals made by the first programs have none.
DIGEST_KEY = "digest"

# Of a journal that was imported from some streams of another: their names, as a JSON list.
STREAMS_KEY = "streams"


def new_meta(*, created_at_ns: int) -> dict[str, str]:
    """Return the rows of a new journal, with an id of its own."""
    return with_digest(
        {
            "format": "residency.journal",
            "journal_id": str(uuid.uuid4()),
            "hash": "sha256",
            "created_at_ns": str(created_at_ns),
        }
    )


def with_digest(meta: Mapping[str, str]) -> dict[str, str]:
    """Return the rows with the digest that fits them."""
    return {**meta, DIGEST_KEY: meta_digest(meta)}


def meta_digest(meta: Mapping[str, str]) -> str:
    """Return the hex SHA-256 of all rows but the digest's own: of their canonical JSON, key -> value."""
    return hashlib.sha256(canonical_json({key: value for key, value in meta.items() if key != DIGEST_KEY})).hexdigest()
