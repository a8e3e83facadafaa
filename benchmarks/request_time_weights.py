"""The weights of a demo pipeline as safetensors files, made once; and a pipeline loaded from them as a worker loads."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from residency.demo_pipeline import assemble, drawn

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from residency.demo_size import DemoSize

FILE_BYTES_MAX = 2 * 2**30  # so that a copy of one file's tensors is all that is on the host beside the files
ROOM_FACTOR = 1.02  # headers, and whole pages of many tensors
# One thread copies a few GiB/s; more than eight gain nothing on the machines seen.
THREADS = 8
MANIFEST = "weights.json"


def make_weights(size: DemoSize, folders: Sequence[Path], *, device: torch.device) -> dict[str, Any]:
    """Draw the weights on a device and write them into the first of some folders that has room.

    Returns the folder, the bytes, and the bytes of each component. Raises OSError if none has room.
    """
    needed = {name: sum(tensor.nbytes for tensor in _state(module).values()) for name, module in _skeletons(size)}
    num_bytes = sum(needed.values())
    folder = _with_room(folders, int(num_bytes * ROOM_FACTOR))
    files: dict[str, list[str]] = {}
    for name, module in drawn(size, device=device):
        files[name] = _write(module, folder, name)
        del module
    (folder / MANIFEST).write_text(json.dumps(files), encoding="utf-8")
    return {"folder": str(folder), "total_bytes": num_bytes, "component_bytes": needed}


def load_pipeline(size: DemoSize, folder: Path) -> Any:
    """Return the pipeline with its weights in ordinary host memory of this process, every page touched."""
    files: dict[str, list[str]] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    components = dict(_skeletons(size))
    for name, module in components.items():
        _fill(module, [folder / file for file in files[name]])
    return assemble(size, components)


def _skeletons(size: DemoSize) -> Iterator[tuple[str, nn.Module]]:
    return drawn(size, device=torch.device("meta"))


def _state(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return all weights by name, tied ones once; also buffers that no checkpoint holds, which no seed gives again."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _write(module: nn.Module, folder: Path, name: str) -> list[str]:
    files = []
    for index, part in enumerate(_parts(_state(module))):
        path = folder / f"{name}-{index:02}.safetensors"
        save_file({key: tensor.detach().cpu().contiguous() for key, tensor in part.items()}, path)
        files.append(path.name)
    return files


def _with_room(folders: Sequence[Path], num_bytes: int) -> Path:
    free = {folder: shutil.disk_usage(folder).free for folder in folders}
    for folder, free_bytes in free.items():
        if free_bytes >= num_bytes:
            return folder
    found = ", ".join(f"{folder} has {free_bytes}" for folder, free_bytes in free.items())
    raise OSError(f"the weights take {num_bytes} bytes, but {found}; name a folder that has room")


def _parts(state: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the tensors in parts of at most FILE_BYTES_MAX, or of a single larger one."""
    part: dict[str, torch.Tensor] = {}
    num_bytes = 0
    for key, tensor in state.items():
        if part and num_bytes + tensor.nbytes > FILE_BYTES_MAX:
            yield part
            part, num_bytes = {}, 0
        part[key] = tensor
        num_bytes += tensor.nbytes
    if part:
        yield part


def _fill(module: nn.Module, paths: Sequence[Path]) -> None:
    """Give a module without storage the tensors of its files; tied weights stay tied."""
    names: dict[int, list[str]] = {}
    for key, weight in [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]:
        names.setdefault(id(weight), []).append(key)
    aliases = {keys[0]: keys for keys in names.values()}
    for path in paths:
        for key, tensor in _touched(path).items():
            is_parameter = isinstance(_get(module, key), nn.Parameter)
            weight = nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor
            for alias in aliases.pop(key):
                owner, _, leaf = alias.rpartition(".")
                setattr(module.get_submodule(owner), leaf, weight)
    if aliases:
        raise ValueError(f"the files have no {', '.join(sorted(aliases))}; make the weights anew")


def _touched(path: Path) -> dict[str, torch.Tensor]:
    """Return copies of a file's tensors; what safetensors hands out is the mapped file itself, not yet read."""
    with safe_open(path, framework="pt", device="cpu") as file, ThreadPoolExecutor(THREADS) as pool:
        keys = list(file.keys())
        mapped = [file.get_tensor(key) for key in keys]
        return dict(zip(keys, pool.map(torch.clone, mapped), strict=True))


def _get(module: nn.Module, key: str) -> object:
    owner, _, leaf = key.rpartition(".")
    return getattr(module.get_submodule(owner), leaf)
