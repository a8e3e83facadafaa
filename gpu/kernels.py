"""What the emulated device does at every operator: check its operands, run it, count its results."""

from __future__ import annotations

import math
from enum import Enum
from typing import TYPE_CHECKING

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from residency.gpu.clock import ModelledClock
    from residency.gpu.ledger import StorageEntry, StorageLedger


class OperatorKind(Enum):
    """What an operator may do with a weight that is on the host."""

    METADATA = "metadata"  # reads no element, or copies at most its first operand: allowed
    COPY = "copy"  # copies elements from host to host: allowed if nothing else takes part
    KERNEL = "kernel"  # computes: refused
    RESIZE = "resize"  # takes memory in place: refused


# Neither views by their schema nor in-place views by their tag, yet they read no element.
_METADATA_NAMES = frozenset(
    {"aten::_unsafe_view", "aten::is_pinned", "aten::is_same_size", "aten::requires_grad_", "aten::set_data"}
)
_COPY_NAMES = frozenset(
    {"aten::clone", "aten::_to_copy", "aten::copy_", "aten::lift", "aten::lift_fresh_copy", "aten::_pin_memory"}
)

_kinds: dict[Callable[..., object], OperatorKind] = {}


def kind_of(func: Callable[..., object]) -> OperatorKind:
    """Return what kind an operator is, by its schema; unknown ones and higher-order ones are kernels."""
    kind = _kinds.get(func)
    if kind is None:
        kind = _kinds[func] = _classify(func)
    return kind


def _classify(func: Callable[..., object]) -> OperatorKind:
    schema = getattr(func, "_schema", None)
    name = schema.name if schema is not None else ""
    if name in _COPY_NAMES:
        return OperatorKind.COPY
    if name == "aten::resize_":
        return OperatorKind.RESIZE
    in_place_view = torch.Tag.inplace_view in getattr(func, "tags", ())
    if getattr(func, "is_view", False) or in_place_view or name in _METADATA_NAMES:
        return OperatorKind.METADATA
    return OperatorKind.KERNEL


class KernelGuard(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """One thread's view of the emulated device: sees every operator that the thread runs while it is entered.

    running_depth: while positive, memory and time are counted; otherwise only host operands are refused.
    moving_depth: while positive, nothing is looked at. permanent: it stays entered when running ends.
    """

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Torch would load its whole compiler, seconds of it, at the first operator; nothing here is compiled.
        return False

    def __init__(self, ledger: StorageLedger, clock: ModelledClock) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.running_depth = 0
        self.moving_depth = 0
        self.permanent = False
        self._ledger = ledger
        self._clock = clock

    def enter(self) -> None:
        """Enter it on this thread."""
        self.__enter__()  # type: ignore[no-untyped-call]

    def leave(self) -> bool:
        """Leave it, if it was the last mode entered on this thread, and say so."""
        if _get_current_dispatch_mode() is not self:
            return False
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        return True

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run the operator. Raises RuntimeError on a host operand, torch.OutOfMemoryError past the cap."""
        if kwargs is None:
            kwargs = {}
        if self.moving_depth or self._ledger.closed:
            return func(*args, **kwargs)
        if types and _has_wrapper(types):
            # A wrapper subclass unpacks itself first; its inner operators come here again.
            return NotImplemented
        kind = kind_of(func)
        try:
            touched_bytes, stays_on_host = self._admit(func, kind, args, kwargs)
        except torch.OutOfMemoryError as error:
            raise error.with_traceback(None) from None
        result = func(*args, **kwargs)
        if not self.running_depth and not stays_on_host:
            return result
        try:
            new_bytes = self._count(result, stays_on_host=stays_on_host)
        except torch.OutOfMemoryError as error:
            # What was made must die now: a traceback would keep it, and the ledger would count it, while it is handled.
            del result
            raise error.with_traceback(None) from None
        if not stays_on_host and (new_bytes or kind is not OperatorKind.METADATA):
            self._clock.add_kernel(touched_bytes + new_bytes)
        return result

    def _admit(
        self, func: Callable[..., object], kind: OperatorKind, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> tuple[int, bool]:
        """Return the bytes of the operands, and whether the results stay on the host."""
        ledger = self._ledger
        touched_bytes = 0
        operands = tensors_in(args)
        if kwargs:
            operands += tensors_in(kwargs.values())
        num_on_host = num_plain = 0
        first_on_host = False
        for position, tensor in enumerate(operands):
            storage = storage_of(tensor)
            if storage is None:
                continue
            num_bytes = storage.nbytes()
            entry = ledger.find(storage)
            if self.running_depth:
                if entry is None:
                    ledger.add_device(storage)
                elif entry.on_device and entry.nbytes != num_bytes:
                    ledger.note_size(entry, num_bytes)
            if entry is None and not self.running_depth:
                num_plain += 1
            if entry is not None and not entry.on_device:
                num_on_host += 1
                first_on_host = first_on_host or position == 0
            # An expanded tensor claims more bytes than there are to read.
            touched_bytes += min(tensor.nbytes, num_bytes)
        if num_on_host:
            # A plain tensor, outside of what runs, is host memory of the caller's: weights are updated from such.
            stays = num_on_host + num_plain == len(operands)
            allowed = kind is OperatorKind.METADATA or (kind is OperatorKind.COPY and stays)
            if not allowed:
                raise RuntimeError(_two_devices_text(func, args, kwargs, ledger))
        elif kind is OperatorKind.RESIZE and self.running_depth:
            ledger.check_room(_growth_of_resize(args))
        return touched_bytes, first_on_host

    def _count(self, result: object, *, stays_on_host: bool) -> int:
        """Count the storages that the operator made or grew, and return their bytes."""
        ledger = self._ledger
        new_bytes = 0
        for tensor in (result,) if isinstance(result, torch.Tensor) else tensors_in((result,)):
            storage = storage_of(tensor)
            if storage is None:
                continue
            entry = ledger.find(storage)
            if entry is None:
                if stays_on_host:
                    ledger.add_host(storage)
                else:
                    new_bytes += ledger.add_device(storage).nbytes
            elif entry.on_device and entry.nbytes != storage.nbytes():
                self._count_growth(tensor, storage, entry)
        return new_bytes

    def _count_growth(self, tensor: torch.Tensor, storage: torch.UntypedStorage, entry: StorageEntry) -> None:
        nbytes = entry.nbytes
        try:
            self._ledger.note_size(entry, storage.nbytes())
        except torch.OutOfMemoryError:
            # An `out=` argument that did not fit gives back what it took; its elements were being overwritten anyway.
            with torch.no_grad():
                tensor.set_(storage, 0, (0,), (1,))
            storage.resize_(nbytes)
            raise


def _has_wrapper(types: Sequence[type]) -> bool:
    # Some torch versions list plain tensors here, too (`detach` in 2.6).
    plain = torch._C._disabled_torch_dispatch_impl
    return any(getattr(kind, "__torch_dispatch__", plain) is not plain for kind in types)


def tensors_in(values: Iterable[object]) -> list[torch.Tensor]:
    """Return the tensors among an operator's arguments or results, and in the lists among them."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_in(value)
    return found


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Return the storage of a tensor with elements in host memory; None for meta, sparse and opaque tensors."""
    if not tensor.is_cpu:
        return None
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


def _growth_of_resize(args: Sequence[object]) -> int:
    tensor, size = args[0], args[1]
    if not isinstance(tensor, torch.Tensor) or not isinstance(size, (list, tuple)):
        return 0
    num_elements = int(tensor.storage_offset()) + math.prod(int(length) for length in size)
    return num_elements * tensor.element_size() - tensor.untyped_storage().nbytes()


def _two_devices_text(
    func: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object], ledger: StorageLedger
) -> str:
    schema = getattr(func, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    named = [*zip(names + [""] * len(args), args, strict=False), *kwargs.items()]
    for name, value in named:
        for tensor in tensors_in((value,)):
            storage = storage_of(tensor)
            entry = ledger.find(storage) if storage is not None else None
            if entry is not None and not entry.on_device:
                return (
                    "Expected all tensors to be on the same device, but found at least two devices, emulated:0 and "
                    f"host! (when checking argument {name!r} of {func}: a {tensor.dtype} weight of shape "
                    f"{tuple(tensor.shape)} is not on the device)"
                )
    return f"Expected all tensors to be on the same device, but an operand of {func} is on the host"
