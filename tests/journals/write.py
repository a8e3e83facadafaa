"""Writes the journals that later programs must still read: `python tests/journals/write.py FOLDER`.

Real workers live through everything that a journal can tell, each in a stream of its own, and old epochs of one are
pruned. To be run once before a release whose journals differ, into a folder of its own; those of releases stay.
"""

from __future__ import annotations

import gzip
import io
import os
import signal
import sys
import tempfile
import time
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import distributed

import residency
from residency.journal.events import Draft, EventType
from residency.journal.export import export
from residency.journal.prune import prune
from residency.journal.reader import JournalReader
from residency.journal.store import Journal
from residency.settings import KILL_SWITCHES

TESTS = Path(__file__).parents[1]


def load(name: str, path: Path) -> Any:
    """Import a module of the tests by its file."""
    spec = spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


tiny = load("tiny", TESTS / "worker" / "tiny.py")
folded = load("fold_journals", TESTS / "journals" / "fold.py").folded
preloaded = load("preloaded", TESTS / "crash" / "preloaded.py")


def live(journal: Path, name: str, **request: Any) -> dict[str, Any]:
    """Live one life of a worker in a child process; returns its exit status and what it said."""
    options = {**request.pop("options", {}), "name": name}
    answer: dict[str, Any] = preloaded.serve({"journal": str(journal), "options": options, **request}, tiny)
    return answer


def rolled_back(journal: Path) -> None:
    """A plan that turns out too large: rolled back, and blamed."""
    worker = tiny.Worker(journal)
    manager = worker.attach(name="rolled-back")
    manager._setup.worker.place(manager._setup.initial)
    initial = manager.placement

    def fail(_: Any) -> None:
        if manager.placement != initial:
            raise torch.OutOfMemoryError("emulated out of memory")

    worker.pipeline.fail = fail
    assert manager.start().decision.value == "rolled-back"
    manager.detach()
    worker.device.close()


def asked(journal: Path) -> None:
    """A serving worker that is asked to calibrate, to validate, and to go back."""
    worker = tiny.Worker(journal)
    manager = worker.attach(name="controlled")
    manager.start()
    for verb in ("calibrate", "validate", "roll_back", "status"):
        manager.handle({"verb": verb, "epoch": manager.epoch, "round": manager.status()["round"]})
    manager.detach()
    worker.device.close()


def pinned(journal: Path) -> None:
    """A start under the kill switch, and one that is thrown in mid-round."""
    sentinel = journal.with_name(journal.name + ".disable")
    sentinel.touch()
    assert live(journal, "pinned")["answer"]["decision"] == "pinned"
    sentinel.unlink()
    worker = tiny.Worker(journal)

    class Throwing(preloaded.Die):  # type: ignore[misc, name-defined]
        def leaving(self, state: str) -> None:
            if state == "applied":
                sentinel.touch()

    manager = worker.attach(name="pinned", observer=Throwing(None, None, 0))
    assert manager.start().decision.value == "pinned"
    manager.detach()
    worker.device.close()
    sentinel.unlink()


def quarantined(journal: Path) -> None:
    """Two deaths of plans that were never committed, and what comes of it."""
    for _ in range(2):
        assert live(journal, "quarantined", effect=0)["status"] == -signal.SIGKILL
    assert live(journal, "quarantined")["answer"]["decision"] == "gated"


def cleared(journal: Path) -> None:
    """The same, and an operator who forgives it."""
    for _ in range(2):
        assert live(journal, "cleared", effect=0)["status"] == -signal.SIGKILL
    assert live(journal, "cleared")["answer"]["decision"] == "gated"
    with Journal.open(journal) as opened:
        (*_, last) = opened.events(stream="cleared")
        started = next(e for e in opened.events(stream="cleared") if e.epoch == last.epoch)
        fingerprint = msgspec.json.decode(started.payload)["fingerprint_digest"]
        forgiven = {"fingerprint": fingerprint, "placement": None, "reason": "the driver was mended"}
        draft = Draft(type=EventType.QUARANTINE_CLEARED, round=0, payload=forgiven)
        opened.append([draft], stream="cleared", epoch=last.epoch)


def together(journal: Path) -> None:
    """A rank that is one of a group, of one."""
    store = distributed.HashStore()  # type: ignore[attr-defined]
    ranks = residency.Ranks(store=store, rank=0, size=1)
    assert live(journal, "together", options={"ranks": ranks})["answer"]["decision"] == "committed"


def all_lives(journal: Path) -> None:
    """Everything, one stream each."""
    assert live(journal, "committed")["answer"]["decision"] == "committed"
    assert live(journal, "committed")["answer"]["decision"] == "restored"
    rolled_back(journal)
    assert live(journal, "kept", options={"cap": 64 * 2**20})["answer"]["decision"] == "kept"
    assert live(journal, "gated", options={"warmup": None})["answer"]["decision"] == "gated"
    pinned(journal)
    asked(journal)
    for state in ("measuring", "planned", "applied", "validating"):
        live(journal, f"killed-{state}", state=state)
    live(journal, "killed-in-mid-move", effect=1)
    live(journal, "recovered", state="validating")
    assert live(journal, "recovered")["answer"]["decision"] == "committed"
    live(journal, "terminated", state="applied", signal=signal.SIGTERM)
    assert live(journal, "rollback-failed", break_rollback=True)["status"] == 70
    assert live(journal, "poisoned", lose_device="validation")["status"] == 71
    assert live(journal, "vanished", vanish=True)["answer"]["decision"] == "committed"
    quarantined(journal)
    cleared(journal)
    together(journal)
    for _ in range(4):
        live(journal, "pruned", options={"warmup": None})
    with Journal.open(journal) as opened:
        (removal,) = prune(opened, stream="pruned", keep_epochs=2, now_ns=time.time_ns())
    assert removal.num_epochs == 2


def main(folder: Path) -> None:
    """Write the journal, its witness, its export and its fold."""
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="residency-journals-") as temporary:
        journal = Path(temporary) / "journal.db"
        all_lives(journal)
        with JournalReader.open(journal) as reader:
            missing = {kind.value for kind in EventType} - {event.type for event in reader.events()}
            assert not missing, f"no life wrote {missing}"
            (folder / "fold.json").write_text(folded(reader), encoding="utf-8")
            out = io.BytesIO()
            export(reader, out)
        (folder / "export.jsonl.gz").write_bytes(gzip.compress(out.getvalue(), mtime=0))
        (folder / "journal.db.gz").write_bytes(gzip.compress(journal.read_bytes(), mtime=0))
        (folder / "journal.db.head").write_bytes(journal.with_name("journal.db.head").read_bytes())


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in KILL_SWITCHES:
        os.environ.pop(name, None)
    main(Path(sys.argv[1]))
