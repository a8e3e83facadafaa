"""Errors after which a process can never use its device again, told from those after which it can, by torch's texts."""

from __future__ import annotations

import pytest
import torch

from residency.errors import EffectFailed, WarmupFailed
from residency.gpu.poison import STICKY, find_poison, is_poisoning

# What torch appends to every error of CUDA's, before version 2.9 and since.
ADVICE = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)
SEARCH = (
    "\nSearch for `{}' in https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html for more information."
)
BUG = ", please report a bug to PyTorch. "

POISONING = [
    torch.AcceleratorError(f"CUDA error: device-side assert triggered{SEARCH.format('cudaErrorAssert')}{ADVICE}"),
    torch.AcceleratorError(
        f"CUDA error: an illegal memory access was encountered{SEARCH.format('cudaErrorIllegalAddress')}{ADVICE}"
    ),
    RuntimeError(f"CUDA error: device-side assert triggered{ADVICE}"),
    RuntimeError(f"CUDA error: an illegal memory access was encountered{ADVICE}"),
    RuntimeError(f"CUDA error: an illegal instruction was encountered{ADVICE}"),
    RuntimeError(f"CUDA error: misaligned address{ADVICE}"),
    RuntimeError(f"CUDA error: unspecified launch failure{ADVICE}"),
    RuntimeError(f"CUDA error: hardware stack error{ADVICE}"),
    RuntimeError(f"CUDA error: uncorrectable ECC error encountered{ADVICE}"),
    RuntimeError(f"CUDA error: the launch timed out and was terminated{ADVICE}"),
    RuntimeError("CUDA driver error: an illegal memory access was encountered"),
    RuntimeError("Triton Error [CUDA]: device-side assert triggered"),
    RuntimeError(
        "NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1333, unhandled cuda error (run with "
        "NCCL_DEBUG=INFO for details), NCCL version 2.21.5\nncclUnhandledCudaError: Call to CUDA function failed.\n"
        "Last error:\nCuda failure 719 'unspecified launch failure'"
    ),
    RuntimeError(f'!handles_.at(i) INTERNAL ASSERT FAILED at "c10/cuda/CUDACachingAllocator.cpp":487{BUG}'),
    RuntimeError(
        f'!block->expandable_segment_ INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":2814{BUG}'
    ),
    RuntimeError(
        'it->second->use_count > 0 INTERNAL ASSERT FAILED at "/pytorch/c10/cuda/CUDACachingAllocator.cpp":2256'
        f"{BUG}\nException raised from beginAllocateToPool (most recent call first):"
    ),
    RuntimeError(
        rf'p.block != nullptr INTERNAL ASSERT FAILED at "C:\b\pytorch\c10\cuda\CUDACachingAllocator.cpp":1{BUG}'
    ),
]

HARMLESS: list[BaseException] = [
    torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 139.80 GiB of which 11.19 MiB "
        "is free. Including non-PyTorch memory, this process has 2.00 GiB memory in use. See documentation for Memory "
        "Management  (https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage)"
    ),
    # Whatever it quotes: an out of memory leaves the allocator as it was.
    torch.OutOfMemoryError("CUDA out of memory, after: CUDA error: device-side assert triggered"),
    RuntimeError(f"CUDA error: out of memory{ADVICE}"),
    # An out of memory whose text could not be made.
    RuntimeError(f'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":830{BUG}'),
    RuntimeError(
        "NVML_SUCCESS == DriverAPI::get()->nvmlInit_v2_() INTERNAL ASSERT FAILED at "
        f'"../c10/cuda/CUDACachingAllocator.cpp":813{BUG}'
    ),
    RuntimeError(f"CUDA error: device not ready{ADVICE}"),
    RuntimeError(f"CUDA error: invalid argument{ADVICE}"),
    RuntimeError(f"CUDA error: invalid configuration argument{ADVICE}"),
    RuntimeError(f"CUDA error: too many resources requested for launch{ADVICE}"),
    RuntimeError(f"CUDA error: no kernel image is available for execution on the device{ADVICE}"),
    RuntimeError(f"CUDA error: part or all of the requested memory range is already mapped{ADVICE}"),
    RuntimeError(f"CUDA error: operation not permitted when stream is capturing{ADVICE}"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError(f'isTensor() INTERNAL ASSERT FAILED at "/pytorch/aten/src/ATen/core/ivalue_inl.h":1945{BUG}'),
    RuntimeError("Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"),
    IndexError("index 9 is out of bounds for dimension 0 with size 4"),
    # A user's words, in an error that is not torch's kind.
    ValueError("the last run said CUDA error: device-side assert triggered"),
    RuntimeError("the frame pointer is a misaligned address"),
    KeyboardInterrupt(),
]


@pytest.mark.parametrize("error", POISONING, ids=lambda error: str(error)[:50])
def test_sticky_errors_and_assertions_of_the_allocator_poison_the_process(error: BaseException) -> None:
    assert is_poisoning(error)
    found = find_poison(error)
    assert found is not None and "\n" not in found
    assert found.startswith(f"{type(error).__name__}: ")


@pytest.mark.parametrize("error", HARMLESS, ids=lambda error: str(error)[:50])
def test_an_out_of_memory_and_what_only_one_call_did_wrong_do_not(error: BaseException) -> None:
    assert not is_poisoning(error)


@pytest.mark.parametrize("code", sorted(STICKY))
def test_the_number_that_torch_keeps_with_an_error_is_enough(code: int) -> None:
    error = torch.AcceleratorError("CUDA error: worded otherwise by another driver")
    assert not is_poisoning(error)
    error.error_code = code  # type: ignore[attr-defined]
    assert is_poisoning(error)


def test_it_is_found_behind_what_it_led_to() -> None:
    poison = POISONING[0]
    failed = EffectFailed(component="vae", action="the move", problem="it failed")
    failed.__cause__ = poison
    warmup = WarmupFailed(problem="raised it")
    warmup.__cause__ = failed
    assert find_poison(warmup) == "AcceleratorError: CUDA error: device-side assert triggered"
    assert is_poisoning(ExceptionGroup("several", [ValueError("other"), poison]))


def test_it_is_found_in_what_was_being_handled_even_if_that_was_suppressed() -> None:
    def clean_up() -> None:
        try:
            raise POISONING[1]
        except RuntimeError:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB") from None

    with pytest.raises(torch.OutOfMemoryError) as caught:
        clean_up()
    assert is_poisoning(caught.value)


def test_a_circle_of_causes_and_an_error_without_text_end() -> None:
    class Mute(RuntimeError):
        def __str__(self) -> str:
            raise ValueError("no text")

    first, second = Mute(), RuntimeError("second")
    first.__cause__, second.__cause__ = second, first
    assert not is_poisoning(first)
