"""Outputs of a request: their arrays, a digest of every bit, and closeness within a tolerance."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

from residency.errors import WarmupFailed

if TYPE_CHECKING:
    from collections.abc import Iterator

NESTING_MAX = 16  # Real outputs nest two or three deep; anything deeper is a cycle.


@runtime_checkable
class _Array(Protocol):
    """A numpy array or scalar, by shape, so that numpy is not needed to recognise one."""

    dtype: object
    shape: tuple[int, ...]

    def tobytes(self) -> bytes: ...

    def tolist(self) -> object: ...


@runtime_checkable
class _Picture(Protocol):
    """A PIL image, by shape, so that PIL is not needed to recognise one."""

    mode: str
    size: tuple[int, int]

    def tobytes(self) -> bytes: ...


def flatten_output(output: object) -> list[torch.Tensor]:
    """Return all that an output holds, in order, as contiguous CPU tensors; blocks until they are computed.

    It looks into tensors, numpy arrays, pictures, numbers and text, and through mappings, model outputs, data classes,
    tuples and lists; None and anything else is left out. Raises WarmupFailed if there is nothing in it.
    """
    arrays = [array for array in _arrays_in(output, depth=0) if array.numel()]
    if not arrays:
        raise WarmupFailed(problem="returned nothing")
    return arrays


def output_digest(output: object) -> str:
    """Return the SHA-256, in hex, of every element's bits, with types and shapes. Raises as `flatten_output`."""
    digest = hashlib.sha256()
    for array in flatten_output(output):
        digest.update(f"{array.dtype} {tuple(array.shape)} {array.nbytes}\n".encode())
        digest.update((ctypes.c_char * array.nbytes).from_address(array.data_ptr()))
    return digest.hexdigest()


def outputs_close(first: object, second: object, tolerance: float) -> bool:
    """Whether two outputs have equal types and shapes and differ nowhere by more than a part of the largest value.

    tolerance: of the largest finite magnitude in the array of `first`, such as 0.01; NaN and infinities must agree.
    Raises WarmupFailed if either output is empty.
    """
    ours, theirs = flatten_output(first), flatten_output(second)
    if [(array.dtype, array.shape) for array in ours] != [(array.dtype, array.shape) for array in theirs]:
        return False
    return all(_close(*pair, tolerance) for pair in zip(ours, theirs, strict=True))


def _close(first: torch.Tensor, second: torch.Tensor, tolerance: float) -> bool:
    wide = torch.complex128 if first.is_complex() else torch.float64
    ours, theirs = first.to(wide), second.to(wide)
    finite = torch.isfinite(ours)
    if not torch.equal(finite, torch.isfinite(theirs)):
        return False
    if not torch.equal(torch.nan_to_num(ours[~finite]), torch.nan_to_num(theirs[~finite])):
        return False
    if not finite.any():
        return True
    allowed = float(ours[finite].abs().max()) * tolerance
    return float((ours[finite] - theirs[finite]).abs().max()) <= allowed


def _arrays_in(value: object, *, depth: int) -> Iterator[torch.Tensor]:
    if depth > NESTING_MAX or value is None:
        return
    if isinstance(value, torch.Tensor):
        yield _on_host(value)
    elif isinstance(value, (bool, int, float, complex)):
        yield torch.tensor(value, dtype=torch.float64 if isinstance(value, int) and abs(value) >= 2**63 else None)
    elif isinstance(value, (str, bytes, bytearray)):
        yield _from_bytes(value.encode() if isinstance(value, str) else value)
    elif isinstance(value, Mapping):
        # Model outputs are mappings, too; they leave out what is None.
        for part in value.values():
            yield from _arrays_in(part, depth=depth + 1)
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _arrays_in(part, depth=depth + 1)
    elif isinstance(value, _Array):
        yield from _from_array(value, depth=depth)
    elif isinstance(value, _Picture):
        yield _from_bytes(value.mode.encode())
        yield _from_picture(value)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _arrays_in(getattr(value, field.name), depth=depth + 1)


def _from_array(value: _Array, *, depth: int) -> Iterator[torch.Tensor]:
    if getattr(value.dtype, "hasobject", False):
        # Its bytes are addresses; what counts is what they point to.
        yield from _arrays_in(value.tolist(), depth=depth + 1)
        return
    try:
        yield torch.tensor(value)
    except (TypeError, ValueError):
        yield _from_bytes(f"{value.dtype} {value.shape}".encode())
        yield _from_bytes(value.tobytes())


def _from_picture(value: _Picture) -> torch.Tensor:
    width, height = value.size
    pixels = _from_bytes(value.tobytes())
    # Pictures of one bit a pixel are packed by rows; their width is then in the bytes alone.
    return pixels.reshape(height, -1) if pixels.numel() % (width * height or 1) else pixels.reshape(height, width, -1)


def _from_bytes(data: bytes | bytearray) -> torch.Tensor:
    if not data:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    return tensor.cpu().resolve_conj().resolve_neg().contiguous()
