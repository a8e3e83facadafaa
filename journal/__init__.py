"""What happened, for ever: an append-only, hash-chained journal. Nothing in here ever imports torch."""
