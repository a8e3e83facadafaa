"""A process that has everything imported, and forks all ranks of a worker for every life that a test asks for.

Reads one JSON list of cases a line and lives them several at a time; answers one JSON list of what became of each. A
case is {"folder", "lives": [life, ...]}, a life {"faults": [fault, ...], "ranks": 4, ...}. A fault is {"rank", "what",
"at", "number"}: `what` is kill, hang (its threads live on), stop (they do not), raise, lie, oom or late; `at` is where
it strikes, see `Faults`.
"""

from __future__ import annotations

import gc
import json
import os
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
from residency.gpu.collectives import StoreTransport
from residency.gpu.output import output_digest
from residency.journal.store import Journal
from residency.settings import KILL_SWITCHES
from residency.statemachine.ranks_together import Together

# Its stores have no public type.
distributed: Any = torch_distributed
torch.set_num_threads(1)
LIFE_S_MAX = 40.0
AT_ONCE = 6  # most of a life is waiting for limits, and a fault's more so
LIMITS = residency.RankLimits(join_s=15.0, step_s=4.0, request_s=4.0, silence_s=1.5, grace_s=0.7, store_s=3.0)
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
    """The tiny pipeline with fewer layers: what a rank computes is not what is tested."""
    made = plain_pipeline(*args)
    made.modules["denoiser"].blocks = made.modules["denoiser"].blocks[:3]
    return made


plain_pipeline, tiny.make_pipeline = tiny.make_pipeline, small_pipeline
tiny.WORKLOAD = residency.Workload(width=96, height=96, frames=1, steps=2, batch=1)


class Staging:
    """The buffers of an all-to-all, which works only while all ranks hold them, made equally often.

    is_ours: dropped and rebuilt by the rounds; else by the rank itself, where it runs out of memory.
    """

    def __init__(self, *, is_ours: bool) -> None:
        self.is_ours = is_ours
        self.held: list[int] = [0]

    def drop(self) -> None:
        """Let go of them."""
        self.held.append(-1)

    def rebuild(self) -> None:
        """Make them anew, with the others."""
        distributed.barrier()
        self.held.append(max(self.held) + 1)

    def interrupt(self) -> None:
        """Nothing that could be interrupted."""

    def all_to_all(self) -> None:
        """Exchange, as a request does."""
        found: list[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(found, self.held[-1])
        if len(set(found)) > 1 or found[0] < 0:
            raise RuntimeError(f"variant access: ranks hold different buffers, {found}")


class Faults:
    """Strikes one rank where its life comes by: at an exchange, before or after it has passed its part (`before`,
    `after`), at an append to the journal that says so (`append`: before, `appended`: after), at the register (`decide`,
    `decided`), in a request (`request`), or before an effect (`effect`). The number counts from 1, in one life.
    """

    def __init__(self, faults: list[dict[str, Any]], rank: int) -> None:
        self.faults = [one for one in faults if one["rank"] == rank]
        self.seen: dict[str, int] = {}
        self.steps: list[str] = []
        self.staging: Staging | None = None
        self.group: Any = None

    def come_by(self, at: str, name: str = "") -> str | None:
        """Strike, if it is here; returns what the caller has to do itself."""
        self.seen[at] = self.seen.get(at, 0) + 1
        for fault in self.faults:
            is_named = fault.get("name") in (None, name, name.partition(".")[2])
            if fault["at"] == at and fault.get("number") in (None, self.seen[at]) and is_named:
                return self._strike(fault["what"])
        return None

    def _strike(self, what: str) -> str | None:
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif what == "hang":
            time.sleep(3600)
        elif what == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif what == "raise":
            raise RuntimeError("struck")
        elif what == "interrupt":
            os.kill(os.getpid(), signal.SIGTERM)
        elif what == "switch":
            os.environ[KILL_SWITCHES[0]] = "1"
        elif what == "late":
            time.sleep(LIMITS.step_s - 1.0)
        return what

    # Where it strikes.

    def install(self) -> None:
        """Have everything come by."""
        plain_append, plain_decide = Journal.append, StoreTransport.decide
        plain_gather, plain_put = StoreTransport.gather, StoreTransport._pass
        plain_agree = Together._agree

        def append(journal: Journal, drafts: Any, **options: Any) -> Any:
            names = {str(one.trigger or one.payload.get("what")) for one in drafts} & {"prepared", "commit", "keep"}
            for name in names:
                self.come_by("append", name)
            events = plain_append(journal, drafts, **options)
            for name in names:
                self.come_by("appended", name)
            return events

        def decide(transport: StoreTransport, word: bytes) -> bytes:
            self.come_by("decide")
            found = plain_decide(transport, word)
            self.come_by("decided")
            return found

        def gather(transport: StoreTransport, step: str, content: bytes, **options: Any) -> Any:
            self.steps.append(step)
            self.come_by("before", step)
            return plain_gather(transport, step, content, **options)

        def put(transport: StoreTransport, key: str, content: bytes) -> None:
            plain_put(transport, key, content)
            self.come_by("after", key.split("/")[-2])

        def agree(ranks: Together, digest: str) -> None:
            plain_agree(ranks, "0" * 64 if self.come_by("digest") == "lie" else digest)

        for kind, name, made in (
            (Journal, "append", append),
            (StoreTransport, "decide", decide),
            (StoreTransport, "gather", gather),
            (StoreTransport, "_pass", put),
            (Together, "_agree", agree),
        ):
            setattr(kind, name, made)

    def working(self, what: str) -> None:
        """Of the observer: nothing."""

    def leaving(self, state: str) -> None:
        """Of the observer: nothing."""

    def between_effects(self, index: int) -> None:
        """Of the observer."""
        self.come_by("effect")

    def in_request(self, shape: Any) -> None:
        """In the middle of a request: all ranks meet, as those of a real one do."""
        if self.come_by("request") == "oom":
            raise torch.OutOfMemoryError("struck: out of memory")
        if self.staging is not None:
            self.staging.all_to_all()
        elif distributed.is_initialized():
            distributed.barrier(self.group)
        if self.come_by("met") == "oom":
            if self.staging is not None and not self.staging.is_ours:
                self.staging.drop()
            raise torch.OutOfMemoryError("struck: out of memory after all have met")


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def open_store(where: str, size: int, rank: int) -> Any:
    """Connect to the store of a life: a port, as of a launcher or in rank 0, or a file, which is quicker to reach."""
    if where.startswith("rank 0 "):
        return distributed.TCPStore("127.0.0.1", int(where.split()[-1]), is_master=rank == 0, wait_for_workers=False)
    if where.isdecimal():
        return distributed.TCPStore("127.0.0.1", int(where), is_master=False, wait_for_workers=False)
    return distributed.FileStore(where, size)


def live(rank: int, life: dict[str, Any], folder: str, where: str) -> dict[str, Any]:
    """Live one rank's life, and say what came of it."""
    faults = Faults(life.get("faults", []), rank)
    faults.install()
    size = life.get("ranks", 4)
    store = open_store(where, size, rank)
    if life.get("store") != "kept":
        # Torch itself cannot be initialized over what an earlier start left in a store.
        distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)
    host = f"host {rank // life.get('per_host', size)}"
    worker = tiny.Worker(Path(folder) / f"{host}.db")
    place: dict[str, Any] = {"store": store, "rank": rank, "size": size} if life.get("store") == "kept" else {}
    if "replicas" in life:
        # Data-parallel: a group for each, which all make in one order.
        width = size // life["replicas"]
        groups = [distributed.new_group(range(first, first + width)) for first in range(0, size, width)]
        place["group"] = faults.group = groups[rank // width]
        life = {**life, "options": {"name": f"replica-{rank // width}"}}
    if "staging" in life:
        faults.staging = Staging(is_ours=life["staging"] == "ours")
        if faults.staging.is_ours:
            place["workspaces"] = faults.staging
    ranks = residency.Ranks(limits=LIMITS, host=host, **place)
    cap = int(CAPS[rank % len(CAPS)] * 2**20)
    options = {"policy": POLICY, "cap": cap, "observer": faults, **life.get("options", {})}
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
    answer["asked"] = [ask(manager, one, rank) for one in life.get("asks", [])]
    worker.pipeline.fail = None
    answer["output"] = output_digest(worker.pipeline.request(tiny.WORKLOAD))
    answer |= {"seconds": time.monotonic() - begun, "state": manager.status()["state"], "steps": faults.steps}
    answer["cpu"] = time.process_time()
    answer |= {"seen": faults.seen, "ready": manager.ready, "joint": vars(manager._epoch.ranks).get("_joint")}
    if not life.get("vanish"):
        manager.detach()
    return answer


def ask(manager: residency.Manager, asked: dict[str, Any], rank: int) -> dict[str, Any] | None:
    """Send a control request, if this rank is asked; the others do something else meanwhile."""
    if rank not in asked.get("ranks", range(4)):
        # Until whoever was asked has given them up.
        time.sleep(LIMITS.step_s + LIMITS.grace_s + 1.0)
        return None
    round_number = manager.status()["round"]
    request = {"verb": asked["verb"], "epoch": manager.epoch, "round": round_number, "attempt": asked.get("attempt", 0)}
    return manager.handle(request)


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
        where = f"rank 0 {_free_port()}"
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
    found: dict[int, dict[str, Any]] = {}
    while children:
        over = time.monotonic() - begun > LIFE_S_MAX
        # One that is stopped ends when nobody waits for it any more.
        stopped = {f["rank"] for f in life.get("faults", []) if f["what"] == "stop"}
        for child, rank in list(children.items()):
            if over or set(children.values()) <= stopped:
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


def serve(cases: list[dict[str, Any]]) -> list[Any]:
    """Live cases, several at a time."""
    answers: dict[int, Any] = {}
    waiting = list(enumerate(cases))
    running: dict[int, tuple[int, int]] = {}
    texts: dict[int, bytes] = {}
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            index, case = waiting.pop(0)
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
