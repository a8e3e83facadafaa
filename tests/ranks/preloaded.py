"""A process that has everything imported, and forks all ranks of a worker for every life that a test asks for.

Reads one JSON list of cases a line and lives them several at a time; answers one JSON list of what became of each. A
case is {"folder", "lives": [life, ...]}, a life {"faults": [fault, ...], "ranks": 4, ...}; faults are those of
`faults.py`.
"""

from __future__ import annotations

import functools
import gc
import json
import os

# A store looks up the name of whoever connects and answers nobody meanwhile: 5 s where a name server is silent.
os.environ["RES_OPTIONS"] = "attempts:0"

import select
import signal
import socket
import sys
import tempfile
import time
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch
from torch import distributed as torch_distributed

import residency
from residency.errors import ResidencyError
from residency.gpu.output import output_digest

# Its stores have no public type.
distributed: Any = torch_distributed
torch.set_num_threads(1)
LIFE_S_MAX = 90.0
# At a time: of cases in which somebody hangs, most of whose time is waiting for limits, and of all others.
AT_ONCE = {True: 4, False: 3}
# MiB. Ranks have other memory, so that they have other placements: not everything fits, or all.
CAPS = (1.55, 8.0)


def load(name: str, path: Path) -> Any:
    """Import a module of the tests by its file."""
    spec = spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


tiny = load("tiny", Path(__file__).parents[1] / "worker" / "tiny.py")
striking = load("rank_faults", Path(__file__).with_name("faults.py"))
# What is planned is as good as any: plans are not what is tested.
POLICY = residency.Policy(
    image_area_max=64 * 64,
    samples_max=1,
    sample_budget_s=5.0,
    simulations_max=2,
    solver_nodes_max=50,
    byte_levels=8,
    window_levels=1,
    step_floor=2,
)


def small_pipeline(*args: Any) -> Any:
    """The tiny pipeline with fewer layers and kernels: what a rank computes is not what is tested."""
    made = plain_pipeline(*args)
    denoiser = made.modules["denoiser"]
    denoiser.blocks = denoiser.blocks[:3]
    denoiser.forward = lambda latents: functools.reduce(lambda value, block: block(value), denoiser.blocks, latents)
    return made


plain_pipeline, tiny.make_pipeline = tiny.make_pipeline, small_pipeline
tiny.WORKLOAD = residency.Workload(width=96, height=96, frames=1, steps=2, batch=1)


def open_store(where: str, size: int, rank: int) -> Any:
    """Connect to the store of a life: a port, as of a launcher or in rank 0, or a file, which is quicker to reach."""
    if where.startswith("rank 0 "):
        port, listening = map(int, where.split()[2:])
        if rank == 0:
            options = {"wait_for_workers": False, "master_listen_fd": listening}
            return distributed.TCPStore("127.0.0.1", port, is_master=True, **options)
        os.close(listening)
        return distributed.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    if where.isdecimal():
        return distributed.TCPStore("127.0.0.1", int(where), is_master=False, wait_for_workers=False)
    return distributed.FileStore(where, size)


def live(rank: int, life: dict[str, Any], folder: str, where: str) -> dict[str, Any]:
    """Live one rank's life, and say what came of it."""
    faults = striking.Faults(life.get("faults", []), rank)
    faults.install()
    size = life.get("ranks", 4)
    store = open_store(where, size, rank)
    if life.get("store") != "kept":
        # Torch itself cannot be initialized over what an earlier start left in a store.
        distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)
    host = f"host {rank // life.get('per_host', size)}"
    worker = tiny.Worker(Path(folder) / f"{host}.db")
    place: dict[str, Any] = {"store": store, "rank": rank, "size": size} if life.get("store") == "kept" else {}
    limits = striking.limits_of(life, range(size))
    if "replicas" in life:
        # Data-parallel: a group for each, which all make in one order.
        width = size // life["replicas"]
        groups = [distributed.new_group(range(first, first + width)) for first in range(0, size, width)]
        place["group"] = faults.group = groups[rank // width]
        limits = striking.limits_of(life, range(rank // width * width, (rank // width + 1) * width))
        life = {**life, "options": {"name": f"replica-{rank // width}"}}
    if "staging" in life:
        faults.staging = striking.Staging(is_ours=life["staging"] == "ours")
        if faults.staging.is_ours:
            place["workspaces"] = faults.staging
    ranks = residency.Ranks(limits=limits, host=host, **place)
    cap = int(CAPS[rank % len(CAPS)] * 2**20)
    options = {"policy": POLICY, "cap": cap, "observer": faults, **life.get("options", {})}
    if "server" in life:
        # As an operator names it, not the program.
        os.environ["RESIDENCY_JOURNAL"] = life["server"]
        options["journal"] = None
    if life.get("misled") == rank:
        options["modes"] = {"nobody": "resident"}
    manager = worker.attach(ranks=ranks, **options)
    steps = [0]

    def in_step(shape: Any) -> None:
        steps[0] += 1
        if steps[0] % shape.steps == 1:
            faults.in_request(shape)

    worker.pipeline.fail = in_step
    begun = time.monotonic()
    answer: dict[str, Any] = manager.start().to_json()
    asks = enumerate(life.get("asks", []))
    answer["asked"] = [ask(manager, one, rank, Path(folder) / f"asked {number}") for number, one in asks]
    worker.pipeline.fail = None
    answer["output"] = output_digest(worker.pipeline.request(tiny.WORKLOAD))
    answer |= {"seconds": time.monotonic() - begun, "state": manager.status()["state"], "steps": faults.steps}
    answer["cpu"] = time.process_time()
    answer |= {"seen": faults.seen, "ready": manager.ready, "joint": vars(manager._epoch.ranks).get("_joint")}
    if not life.get("vanish"):
        manager.detach()
    return answer


def ask(manager: residency.Manager, asked: dict[str, Any], rank: int, over: Path) -> dict[str, Any] | None:
    """Send a control request, if this rank is asked; the others do something else until it is over."""
    if rank not in asked.get("ranks", range(4)):
        while not over.exists():
            time.sleep(0.02)
        return None
    round_number = manager.status()["round"]
    request = {"verb": asked["verb"], "epoch": manager.epoch, "round": round_number, "attempt": asked.get("attempt", 0)}
    answer = manager.handle(request)
    over.touch()
    return answer


def run_rank(rank: int, life: dict[str, Any], folder: str, where: str, answer: Path) -> None:
    """Be a rank, in a forked child: the answer goes to a file, the exit code is a worker's."""
    code = 0
    begun = time.monotonic()
    try:
        said = live(rank, life, folder, where)
    except ResidencyError as error:
        said, code = {"error": type(error).__name__, "text": str(error)}, error.exit_code
    except RuntimeError as error:
        said, code = {"error": type(error).__name__, "text": str(error)}, 1
    answer.write_text(json.dumps({"seconds": time.monotonic() - begun, **said}), encoding="utf-8")
    os._exit(code)


def run_life(life: dict[str, Any], folder: str) -> list[dict[str, Any]]:
    """Fork all ranks, with a store of their own as a launcher gives them, and wait for them."""
    answers = Path(tempfile.mkdtemp(dir=folder))
    where, server = str(answers / "store"), None
    if life.get("store") == "kept":
        where = str(Path(folder) / "store")
    if "forget" in life:
        for one in Path(folder).glob(f"{life['forget']}*"):
            one.unlink()
    if life.get("store") == "rank 0":
        # Listening from now on, so that nobody else is given the port.
        server = socket.create_server(("127.0.0.1", 0))
        where = f"rank 0 {server.getsockname()[1]} {server.fileno()}"
    if life.get("store") == "tcp":
        server = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        where = str(server.port)
    begun = time.monotonic()
    children = {}
    for rank in range(life.get("ranks", 4)):
        child = os.fork()
        if child == 0:
            run_rank(rank, life, folder, where, answers / str(rank))
        children[child] = rank
    if isinstance(server, socket.socket):
        server.close()
    return wait_for(children, life, answers, begun)


def wait_for(children: dict[int, int], life: dict[str, Any], answers: Path, begun: float) -> list[dict[str, Any]]:
    """Wait for all ranks, {process: rank}; returns what each said."""
    found: dict[int, dict[str, Any]] = {}
    while children:
        over = time.monotonic() - begun > LIFE_S_MAX
        # One that is stopped, or hangs where it has no limit of its own, ends when nobody waits for it any more.
        stopped = {f["rank"] for f in life.get("faults", []) if f["what"] in ("stop", "hang")}
        is_waited_for = not set(children.values()) <= stopped
        for child, rank in list(children.items()):
            if over or not is_waited_for:
                os.kill(child, signal.SIGKILL)
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                del children[child]
                said = answers / str(rank)
                answer = json.loads(said.read_text()) if said.exists() else {}
                took = time.monotonic() - begun
                found[rank] = {"status": os.waitstatus_to_exitcode(status), "took": took, "over": over, **answer}
        time.sleep(0.005)
    return [found[rank] for rank in sorted(found)]


def run_case(case: dict[str, Any], writing: int) -> None:
    """Live all lives of a case, in a forked child."""
    os.setpgrp()
    found = [run_life(life, case["folder"]) for life in case["lives"]]
    with os.fdopen(writing, "w") as pipe:
        pipe.write(json.dumps(found))
    os._exit(0)


def is_slow(case: dict[str, Any]) -> bool:
    """Whether somebody hangs in it."""
    return any(fault["what"] == "hang" for life in case["lives"] for fault in life.get("faults", []))


def next_of(waiting: dict[bool, list[int]], running: list[bool]) -> int | None:
    """Return the case to begin next, taken from those that wait by kind; None if enough of each are running."""
    for kind, indices in waiting.items():
        if indices and running.count(kind) < AT_ONCE[kind]:
            return indices.pop(0)
    return None


def serve(cases: list[dict[str, Any]]) -> list[Any]:
    """Live cases, several at a time."""
    answers: dict[int, Any] = {}
    waiting: dict[bool, list[int]] = {True: [], False: []}
    for index, case in enumerate(cases):
        waiting[is_slow(case)].append(index)
    running: dict[int, tuple[int, int]] = {}
    texts: dict[int, bytes] = {}
    asked_by = os.getppid()
    while any(waiting.values()) or running:
        if os.getppid() != asked_by:
            return []  # whoever asked is gone
        while (begun := next_of(waiting, [is_slow(cases[one]) for one, _ in running.values()])) is not None:
            index, case = begun, cases[begun]
            reading, writing = os.pipe()
            child = os.fork()
            if child == 0:
                run_case(case, writing)
            os.close(writing)
            running[reading] = index, child
            texts[reading] = b""
        for reading in select.select(list(running), [], [])[0]:
            part = os.read(reading, 1 << 20)
            texts[reading] += part
            if not part:
                index, child = running.pop(reading)
                os.close(reading)
                os.waitpid(child, 0)
                answers[index] = json.loads(texts.pop(reading) or b"null")
    return [answers[index] for index in range(len(cases))]


def warm_up() -> None:
    """Live one short life here, so that nothing is imported or compiled anew in every child."""
    with tempfile.TemporaryDirectory() as folder:
        worker = tiny.Worker(Path(folder) / "journal.db")
        store = distributed.HashStore()
        manager = worker.attach(ranks=residency.Ranks(store=store, rank=0, size=1), policy=POLICY)
        manager.start()
        manager.detach()
        worker.device.close()
    # Every rank is a process that was forked from here: what is made once is everybody's own.
    made = small_pipeline()
    tiny.make_pipeline = lambda *_: made
    gc.collect()
    gc.freeze()


def main() -> None:
    """Serve requests until the input ends."""
    warm_up()
    for line in sys.stdin:
        sys.stdout.write(json.dumps(serve(json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
