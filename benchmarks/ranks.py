"""What a round over ranks costs: `torchrun --nproc-per-node 2 benchmarks/ranks.py --pipeline flux --device cuda`.

Every rank holds a pipeline of its own as its shard, under a cap of its own, and meets the others in every request, as
shards do. The start is timed (calibrating, then restoring in a second run on the same journal), what of it ranks spend
waiting for each other, and an exchange over the store beside a gloo object collective. Rank 0 writes JSON. `--spawn 2`
starts the ranks itself, where there is no torchrun, with a store that outlives each of them; then `--kill vote` kills
the last rank before that exchange, every other one writes a line on what became of it and after how long, and the same
command without it is the restart.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from collections.abc import Callable

# Its stores have no public type.
stores: Any = distributed
EXCHANGES = 200
CONTENT = "x" * 1000


# A killed rank is missed soon, and nobody has to wait for what was to be measured.
KILLED = residency.RankLimits(join_s=300.0, step_s=120.0, silence_s=5.0, grace_s=10.0)


class Waits:
    """Books what this rank waits for the others, by step. killed_at: the step before which it kills itself."""

    def __init__(self, killed_at: str | None) -> None:
        self.seconds: dict[str, float] = {}
        plain = StoreTransport.gather

        def gather(transport: StoreTransport, step: str, content: bytes, **options: Any) -> Any:
            begun, name = time.perf_counter(), step.partition(".")[2]
            if name == killed_at:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                return plain(transport, step, content, **options)
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begun

        setattr(StoreTransport, "gather", gather)  # noqa: B010 - a method, as far as a checker knows


def main() -> None:
    """Run as a rank of torchrun, or start the ranks."""
    parser = arguments()
    asked = parser.parse_args()
    if asked.kill is not None and asked.spawn is None:
        # torchrun would end the others, too.
        parser.error("--kill needs --spawn")
    if asked.spawn is None:
        run(asked)
        return
    # Held here, as a launcher holds it: no rank takes it along when it ends.
    store = stores.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    start = torch.multiprocessing.get_context("spawn").Process
    started = [start(target=spawned, args=(rank, asked, store.port)) for rank in range(asked.spawn)]
    for one in started:
        one.start()
    for one in started:
        one.join()
    ended = [one.exitcode for one in started]
    if asked.kill is not None:
        sys.stdout.write(json.dumps({"killed": asked.spawn - 1, "at": asked.kill, "exit_codes": ended}) + "\n")
    elif any(ended):
        sys.exit(f"ranks ended with {ended}")


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
    parser.add_argument(
        "--kill", metavar="STEP", help="of the round: ready, request, plan, applied, verdict, vote, ..."
    )
    return parser


def spawned(rank: int, asked: argparse.Namespace, port: int) -> None:
    """Be one of the ranks that this script started, with what torchrun would set."""
    os.environ.update({"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(asked.spawn)})
    store = stores.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    run(asked, store=store, rank=rank, world_size=asked.spawn)


def run(asked: argparse.Namespace, **place: Any) -> None:
    """Attach, start, serve, and tell. place: of this rank, where there is no torchrun."""
    quieten()
    local = int(os.environ.get("LOCAL_RANK", "0"))
    is_cuda = asked.device == "cuda"
    if is_cuda:
        torch.cuda.set_device(local)
    else:
        torch.set_num_threads(1)
    distributed.init_process_group("cpu:gloo,cuda:nccl" if is_cuda else "gloo", **place)
    rank, num = distributed.get_rank(), distributed.get_world_size()
    size = demo_pipeline.SIZES[asked.pipeline]
    caps = asked.caps.split(",") if asked.caps else [size.cap]
    cap = caps[rank % len(caps)]
    exchanges = time_exchanges(rank, num)
    # What NCCL takes of a card at its first collective is taken before anything is measured.
    meet = meeting(is_cuda=is_cuda)
    meet()
    device = open_device(
        asked.device, cap_bytes=parse_size(cap, name="--caps"), allocator_settings=allocator_settings()
    ).torch_device
    pipe = demo_pipeline.build(size, device=device)
    is_killed = asked.kill is not None and rank == num - 1
    waits = Waits(asked.kill if is_killed else None)

    def serve(shape: residency.Workload) -> torch.Tensor:
        try:
            return demo_pipeline.request(pipe, size, shape, device=device)
        finally:
            # Shards meet in every request, also in one for which memory runs out.
            meet()

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
        ranks=residency.Ranks() if asked.kill is None else residency.Ranks(limits=KILLED),
    )
    begun = time.perf_counter()
    report = manager.start()
    if asked.kill is not None:
        told = {"rank": rank, "decision": report.decision.value, "reason": report.reason}
        sys.stdout.write(json.dumps({**told, "start_s": time.perf_counter() - begun}) + "\n")
        sys.stdout.flush()
        # Whatever NCCL and gloo still hold of the killed rank, nobody waits for.
        os._exit(0)
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


def meeting(*, is_cuda: bool) -> Callable[[], None]:
    """Return what all ranks call to meet: over NCCL on cards, where a barrier of both backends would take gloo."""
    if not is_cuda:
        return distributed.barrier
    beat = torch.zeros(1, device="cuda")

    def meet() -> None:
        distributed.all_reduce(beat)
        torch.cuda.synchronize()

    return meet


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
