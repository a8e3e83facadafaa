"""How many processes run this pipeline together."""

from __future__ import annotations

import torch.distributed


def num_ranks() -> int:
    """Return the size of the process group, 1 if there is none. Read-only."""
    is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if is_distributed else 1
