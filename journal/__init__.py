"""What happened, for ever: an append-only, hash-chained journal."""
