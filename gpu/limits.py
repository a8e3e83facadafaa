"""Checks that every device makes of the sizes it is given."""

from __future__ import annotations

from typing import TYPE_CHECKING

from residency.errors import SettingsError

if TYPE_CHECKING:
    import torch


def check_cap(cap_bytes: int, *, total_bytes: int) -> None:
    """Raise SettingsError unless a cap is a positive number of bytes that the device has."""
    if not 0 < cap_bytes <= total_bytes:
        raise SettingsError(
            f"the memory cap is {cap_bytes} bytes, the device has {total_bytes}; "
            "give a size above 0 and at most that of the device, such as '24GiB'",
            cap_bytes=cap_bytes,
            total_bytes=total_bytes,
        )


def check_same_size(source: torch.UntypedStorage, into: torch.UntypedStorage | None) -> None:
    """Raise ValueError if `into` cannot hold exactly the bytes of `source`."""
    if into is not None and into.nbytes() != source.nbytes():
        raise ValueError(f"a storage of {source.nbytes()} bytes cannot be copied into one of {into.nbytes()} bytes")
