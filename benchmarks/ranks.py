"""What a round over ranks costs: `torchrun --nproc-per-node 2 benchmarks/ranks.py --pipeline flux --device cuda`.

Every rank holds a pipeline of its own as its shard, under a cap of its own, and meets the others in every request, as
shards do. The start is timed (calibrating, then restoring in a second run on the same journal), what of it ranks spend
waiting for each other, and an exchange over the store beside a gloo object collective. Rank 0 writes JSON. `--spawn 2`
starts the ranks itself, where there is no torchrun.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.multiprocessing
from torch import distributed

import residency
from residency import demo_pipeline
from residency.demo import quieten
from residency.gpu.collectives import StoreTransport
from residency.gpu.devices import open_device
from residency.gpu.output import output_digest
from residency.settings import allocator_settings, parse_size

EXCHANGES = 200
CONTENT = "x" * 1000


class Waits:
    """Books what this rank waits for the others, by step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        plain = StoreTransport.gather

        def gather(transport: StoreTransport, step: str, content: bytes, **options: Any) -> Any:
            begun = time.perf_counter()
            try:
                return plain(transport, step, content, **options)
            finally:
                name = step.partition(".")[2]
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begun

        setattr(StoreTransport, "gather", gather)  # noqa: B010 - a method, as far as a checker knows


def main() -> None:
    """Run as a rank of torchrun, or start the ranks."""
    asked = arguments().parse_args()
    if asked.spawn is None:
        run(asked)
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(spawned, args=(asked, port), nprocs=asked.spawn)  # type: ignore[no-untyped-call]


def arguments() -> argparse.ArgumentParser:
    """Return what may be asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pipeline", choices=sorted(demo_pipeline.SIZES), default="flux")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--caps", default="", help="of the ranks in turn, such as 24GiB,40GiB; the pipeline's own")
    parser.add_argument("--journal", required=True, help="one for all ranks of a host; run twice to restore")
    parser.add_argument("--output", type=Path, help="where rank 0 writes what all found")
    parser.add_argument("--requests", type=int, default=3)
    parser.add_argument("--spawn", type=int)
    return parser


def spawned(rank: int, asked: argparse.Namespace, port: int) -> None:
    """Be one of the ranks that this script started, with what torchrun would set."""
    size = str(asked.spawn)
    ours = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ.update({**ours, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    run(asked)


def run(asked: argparse.Namespace) -> None:
    """Attach, start, serve, and tell."""
    quieten()
    local = int(os.environ.get("LOCAL_RANK", "0"))
    is_cuda = asked.device == "cuda"
    if is_cuda:
        torch.cuda.set_device(local)
    else:
        torch.set_num_threads(1)
    distributed.init_process_group("cpu:gloo,cuda:nccl" if is_cuda else "gloo")
    rank, num = distributed.get_rank(), distributed.get_world_size()
    size = demo_pipeline.SIZES[asked.pipeline]
    caps = asked.caps.split(",") if asked.caps else [size.cap]
    cap = caps[rank % len(caps)]
    exchanges = time_exchanges(rank, num)
    device = open_device(
        asked.device, cap_bytes=parse_size(cap, name="--caps"), allocator_settings=allocator_settings()
    ).torch_device
    pipe = demo_pipeline.build(size, device=device)
    waits = Waits()

    def serve(shape: residency.Workload) -> torch.Tensor:
        try:
            return demo_pipeline.request(pipe, size, shape, device=device)
        finally:
            # Shards meet in every request, also in one for which memory runs out; over NCCL on cards.
            distributed.barrier()

    manager = residency.attach(
        pipe,
        journal=asked.journal,
        workload=size.workload,
        warmup=serve,
        name=f"benchmark-{size.name}",
        vram=cap,
        device=asked.device,
        identity=demo_pipeline.identity(size),
        policy=size.policy,
        ranks=residency.Ranks(),
    )
    report = manager.start()
    samples = [timed(lambda: serve(size.workload)) for _ in range(asked.requests)]
    found = {
        "rank": rank,
        "cap": cap,
        "device": torch.cuda.get_device_name(local) if is_cuda else "emulated on the CPU: no figure of speed",
        "decision": report.decision.value,
        "reason": report.reason,
        "round": report.round,
        "placement": report.placement.digest,
        "modes": {name: one.mode.value for name, one in report.placement.components.items()},
        "ready_s": report.ready_ms / 1e3,
        "journal_s": report.journal_ms / 1e3,
        "waited_s": waits.seconds,
        "request_s": median(samples),
        "output": output_digest(serve(size.workload)),
    }
    gathered: list[Any] = [None] * num
    distributed.all_gather_object(gathered, found)
    if rank == 0:
        text = json.dumps({"exchange_ms": exchanges, "torch": torch.__version__, "ranks": gathered}, indent=1)
        sys.stdout.write(text + "\n")
        if asked.output is not None:
            asked.output.write_text(text, encoding="utf-8")
    manager.detach()
    distributed.destroy_process_group()


def timed(call: Any) -> float:
    """Return the seconds that it takes."""
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def time_exchanges(rank: int, num: int) -> dict[str, float]:
    """Return the medians, in ms, of one exchange of 1 kB over the store and by a gloo object collective."""
    store: Any = distributed.distributed_c10d._get_default_store().clone()
    group: Any = distributed.new_group(backend="gloo")
    gathered: list[Any] = [None] * num

    def over_store(number: int) -> None:
        keys = [f"exchange/{number}/{other}" for other in range(num)]
        store.set(keys[rank], CONTENT)
        while not store.check(keys):
            time.sleep(0.0002)
        for key in keys:
            store.get(key)

    times = {"store": [], "gloo": []}  # type: dict[str, list[float]]
    for number in range(EXCHANGES):
        times["store"].append(timed(lambda number=number: over_store(number)))  # type: ignore[misc]
        times["gloo"].append(timed(lambda: distributed.all_gather_object(gathered, CONTENT, group=group)))
    return {name: median(samples) * 1e3 for name, samples in times.items()}


if __name__ == "__main__":
    main()
