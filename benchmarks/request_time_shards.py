"""What is measured, as values: modes, what a process of one mode is told, and shards that fit into ten minutes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from residency.gpu.placement import Placement
from residency.settings import parse_size

GIB, MIB = 2**30, 2**20

WEIGHTS, LINK, RESIDENT, OURS = "weights", "link", "resident", "ours"
MODEL_OFFLOAD, GROUP_BLOCK, GROUP_LEAF = "model-offload", "group-block", "group-leaf"
MMGP_1, MMGP_2 = "mmgp-1", "mmgp-2"  # its profiles; its licence forbids commercial use, so nothing here needs it
BYTES_USES = "bytes-times-uses"  # our engine under the placement of a planner that knows nothing of overlap
PLANNED = (OURS, BYTES_USES)
PEERS = (GROUP_LEAF, MMGP_1, MMGP_2, GROUP_BLOCK, MODEL_OFFLOAD)  # the slowest last
PACKAGES = {MMGP_1: "mmgp", MMGP_2: "mmgp"}  # all others are in diffusers

# Longest seen or expected on an H200 with 31 GiB of weights, reading them included, and half of it again.
TIMEOUT_S = {WEIGHTS: 120, LINK: 60, RESIDENT: 120, OURS: 120, GROUP_LEAF: 150, GROUP_BLOCK: 170, MODEL_OFFLOAD: 200}
TIMEOUT_OTHER_S = 170
TIMEOUT_FACTOR = {"wan": 1.8}  # more weights, and requests of several seconds
COMPILE_S = 90  # of the first compiled request, at most
STEP_S = 10  # for every further denoise step of a process: a dozen requests, the slowest peers' included


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """One way to serve requests. cap_bytes: of device memory, enforced before anything is loaded; None: no cap."""

    kind: str
    cap_bytes: int | None = None

    @property
    def name(self) -> str:
        """How tables and files call it."""
        return self.kind if self.cap_bytes is None else f"{self.kind}@{size_text(self.cap_bytes)}"

    @property
    def is_peer(self) -> bool:
        """Whether it is somebody else's way of serving under a cap."""
        return self.kind not in (WEIGHTS, LINK, RESIDENT, *PLANNED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What all processes of a shard have in common.

    steps: of every request; None: as many as the pipeline's workload has. requests: at most so many are timed, fewer
    once they have taken requests_s, but two at least.
    """

    pipeline: str
    device: str = "cuda"
    steps: int | None = None
    compiled: bool = False
    requests: int = 5
    requests_s: float = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What the process of one mode is told. placement: ours, as configured. timeline: profile one more request.

    weights: the folder they are read from; of the process that makes them the folders it may choose from.
    """

    mode: Mode
    settings: Settings
    weights: str
    placement: Placement | None = None
    timeline: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A part of the benchmark that ends within ten minutes; each measures link and all-resident anew.

    caps: under which ours is measured. peers: the others.
    """

    name: str
    settings: Settings
    caps: tuple[int, ...]
    peers: tuple[Mode, ...] = ()

    @property
    def modes(self) -> tuple[Mode, ...]:
        """What is measured, in this order: what the later ones need comes first, the slowest last."""
        ours = tuple(Mode(kind=OURS, cap_bytes=cap) for cap in self.caps)
        return (Mode(kind=LINK), Mode(kind=RESIDENT), *ours, *self.peers)

    def on(self, device: str) -> Shard:
        """Return it for another kind of device."""
        return replace(self, settings=replace(self.settings, device=device))


def timeout_s(mode: Mode, settings: Settings) -> float:
    """Return how long a process of this mode may take."""
    seconds = TIMEOUT_S.get(mode.kind, TIMEOUT_OTHER_S) * TIMEOUT_FACTOR.get(settings.pipeline, 1.0)
    if mode.kind not in (WEIGHTS, LINK):
        seconds += COMPILE_S if settings.compiled else 0
        seconds += STEP_S * max(0, (settings.steps or 4) - 4)
    return seconds


def parse_caps(text: str) -> tuple[int, ...]:
    """Return caps in bytes of '40,28,24' (GiB) or '64MiB,48MiB', largest first. Raises SizeError."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    sizes = {parse_size(f"{word}GiB" if word.replace(".", "", 1).isdigit() else word, name="--caps") for word in words}
    return tuple(sorted(sizes, reverse=True))


def parse_peers(text: str, caps: tuple[int, ...]) -> tuple[Mode, ...]:
    """Return the peers of 'group-leaf,group-block', each under every cap; 'all' means all, 'none' and '' none.

    'bytes-times-uses', which is another planner for our engine, has to be named.
    Raises ValueError for one that is unknown.
    """
    if text in ("", "none"):
        return ()
    kinds = PEERS if text == "all" else tuple(word.strip() for word in text.split(","))
    unknown = [kind for kind in kinds if kind not in (*PEERS, BYTES_USES)]
    if unknown:
        raise ValueError(f"there is no peer {', '.join(unknown)}; known are {', '.join((*PEERS, BYTES_USES))}")
    return tuple(Mode(kind=kind, cap_bytes=cap) for cap in caps for kind in kinds)


def size_text(num_bytes: int) -> str:
    """Return '24GiB', '1.5GiB' or '48MiB'."""
    unit, name = (GIB, "GiB") if num_bytes >= GIB else (MIB, "MiB")
    return f"{num_bytes / unit:.4g}{name}"


def _gib(*sizes: float) -> tuple[int, ...]:
    return tuple(int(size * GIB) for size in sizes)


def _mib(*sizes: int) -> tuple[int, ...]:
    return tuple(size * MIB for size in sizes)


def _peers(caps: tuple[int, ...], kinds: tuple[str, ...] = PEERS) -> tuple[Mode, ...]:
    return tuple(Mode(kind=kind, cap_bytes=cap) for cap in caps for kind in kinds)


_FLUX, _WAN = Settings(pipeline="flux"), Settings(pipeline="wan")

SHARDS = {
    shard.name: shard
    for shard in (
        Shard(name="flux", settings=_FLUX, caps=_gib(40, 28, 24, 16, 12, 8)),
        # Ours again in each, so that the ratio to the best peer is of one machine and one quarter of an hour.
        Shard(name="flux-peers-24", settings=_FLUX, caps=_gib(24), peers=_peers(_gib(24))),
        Shard(name="flux-peers-12", settings=_FLUX, caps=_gib(12), peers=_peers(_gib(12))),
        Shard(name="flux-peers-8", settings=_FLUX, caps=_gib(8), peers=_peers(_gib(8))),
        Shard(
            name="flux-28-steps",
            settings=replace(_FLUX, steps=28),
            caps=_gib(24, 12, 8),
            peers=_peers(_gib(24), (GROUP_LEAF,)),
        ),
        Shard(
            name="flux-compiled",
            settings=replace(_FLUX, compiled=True),
            caps=_gib(24, 12),
            peers=_peers(_gib(24), (GROUP_LEAF,)),
        ),
        Shard(name="wan", settings=_WAN, caps=_gib(48, 32, 24, 16)),
        Shard(name="wan-peers-24", settings=_WAN, caps=_gib(24), peers=_peers(_gib(24), (GROUP_LEAF, GROUP_BLOCK))),
        Shard(name="small", settings=Settings(pipeline="small"), caps=_mib(96, 48, 32)),
        Shard(name="small-wan", settings=Settings(pipeline="small-wan"), caps=_mib(24, 16)),
    )
}
