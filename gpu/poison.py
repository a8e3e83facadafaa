"""Which errors mean that the device is lost to this process: sticky CUDA errors, and a broken caching allocator."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

TEXT_MAX = 300  # characters of an error that are told

# The errors of which CUDA's documentation says that every later call in the process returns them, too: its number
# (which newer versions of torch keep with the error) -> its text, as the driver words it.
STICKY: dict[int, str] = {
    214: "uncorrectable ECC error encountered",
    220: "uncorrectable NVLink error detected during the execution",
    226: "Invalid access of peer GPU memory over nvlink or a hardware error",
    700: "an illegal memory access was encountered",
    702: "the launch timed out and was terminated",
    709: "context is destroyed",
    710: "device-side assert triggered",
    714: "hardware stack error",
    715: "an illegal instruction was encountered",
    716: "misaligned address",
    717: "operation not supported on global/shared address space",
    718: "invalid program counter",
    719: "unspecified launch failure",
    721: "tensor memory not completely freed",
}

# An assertion of torch's caching allocator about its own books, which it finds wrong at every later call as well.
_ALLOCATOR_ASSERTION = re.compile(r"INTERNAL ASSERT FAILED at \"[^\"]*Allocator\.(?:cpp|h)\"")
# This one is about NVML, asked for what to write into the text of an ordinary out of memory: the books are right.
_NVML_ASSERTION = re.compile(r"NVML_SUCCESS == .*INTERNAL ASSERT FAILED")


def is_poisoning(error: BaseException) -> bool:
    """Whether an exception, or one that led to it, means that this process can never use the device again.

    True for sticky CUDA errors and assertions of torch's caching allocator. Never for an out of memory, however it is
    worded, nor for what only this call did wrong. Where CUDA reports an error late, in an unrelated call, it is found
    by its text all the same.
    """
    return find_poison(error) is not None


def find_poison(error: BaseException) -> str | None:
    """Return what lost the device to this process, in one line; None if `is_poisoning` is False."""
    for one in _chain(error):
        # OutOfMemoryError is a RuntimeError, too; its text may quote anything.
        if isinstance(one, RuntimeError) and not isinstance(one, torch.OutOfMemoryError):
            text = _text(one)
            if _is_sticky(one, text) or _is_allocator_assertion(text):
                # After the first line comes advice on debugging, the same for all errors.
                return f"{type(one).__name__}: {text.partition(chr(10))[0]}"[:TEXT_MAX]
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception, what caused it, and what was being handled; each once."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        # Also what `from None` suppressed: it happened.
        waiting += [one.__context__, one.__cause__]
        if isinstance(one, BaseExceptionGroup):
            waiting += one.exceptions


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - a user's exception may do anything
        return ""


def _is_sticky(error: RuntimeError, text: str) -> bool:
    if getattr(error, "error_code", None) in STICKY:
        return True
    # Triton and NCCL say CUDA, too, each in its own way; a user's error of the same words does not.
    return "cuda" in text.lower() and any(words in text for words in STICKY.values())


def _is_allocator_assertion(text: str) -> bool:
    return _ALLOCATOR_ASSERTION.search(text) is not None and _NVML_ASSERTION.search(text) is None
