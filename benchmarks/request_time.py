"""Time requests of a pipeline whose weights do not fit the device: the link, all-resident, residency, and its peers."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from benchmarks.request_time_figures import FORMAT, Group, figures, group_of, merge, read_document, worst
from benchmarks.request_time_plot import time_plot, timeline_plot
from benchmarks.request_time_report import compare, tables
from benchmarks.request_time_runs import Run, run_shard, weights_folder
from benchmarks.request_time_shards import PEERS, SHARDS, Settings, Shard, parse_caps, parse_peers, size_text
from residency.errors import ResidencyError

if TYPE_CHECKING:
    from benchmarks.request_time_figures import Document

# A command on a borrowed machine may take ten minutes; what is left is for starting and for copying results back.
BUDGET_S = 570.0
CAPS = {"flux": "40,28,24,16,12,8", "wan": "32,24,16,12", "small": "96MiB,48MiB,32MiB", "small-wan": "24MiB,16MiB"}
PATH = click.Path(path_type=Path, dir_okay=False)


@click.command()
@click.option("--list-shards", is_flag=True, help="Print the shards, and do nothing.")
@click.option("--shard", "names", multiple=True, type=click.Choice(tuple(SHARDS)), help="Run it; may be given again.")
@click.option("--pipeline", type=click.Choice(tuple(CAPS)), help="Run this pipeline instead of a shard, or draw it.")
@click.option("--caps", help="For --pipeline: caps in GiB or with a unit, such as '24,12' or '48MiB,32MiB'.")
@click.option("--peers", default="none", help="For --pipeline: 'all', or names, such as 'group-leaf,group-block'.")
@click.option("--steps", type=click.IntRange(min=1), help="Denoise steps; as many as the pipeline's own workload.")
@click.option("--compiled", is_flag=True, help="Compile every block of the transformer.")
@click.option("--requests", type=click.IntRange(min=1), default=5, show_default=True, help="Timed requests a mode.")
@click.option("--device", type=click.Choice(("cuda", "cpu")), default="cuda", show_default=True)
@click.option("--budget-s", type=float, default=BUDGET_S, show_default=True, help="Of the whole run, in seconds.")
@click.option("--weights", type=click.Path(path_type=Path, file_okay=False), help="Keep the weights there for reuse.")
@click.option("--output", type=PATH, default="request_time.json", show_default=True, help="Results, row by row.")
@click.option("--merge", "is_merge", is_flag=True, help="Run nothing: merge FILES into --output.")
@click.option("--compare", "old", type=PATH, help="Older results to compare with.")
@click.option("--plot", type=PATH, help="Write time against cap as SVG.")
@click.option("--timeline", type=PATH, help="Write the timeline of the worst of our requests as SVG.")
@click.argument("files", nargs=-1, type=PATH)
def main(
    list_shards: bool,
    names: tuple[str, ...],
    pipeline: str | None,
    caps: str | None,
    peers: str,
    steps: int | None,
    compiled: bool,
    requests: int,
    device: str,
    budget_s: float,
    weights: Path | None,
    output: Path,
    is_merge: bool,
    old: Path | None,
    plot: Path | None,
    timeline: Path | None,
    files: tuple[Path, ...],
) -> None:
    """Measure, or merge and compare what was measured; prints tables in Markdown.

    Every mode runs in a process of its own under the same cap, enforced before anything is loaded; one that fails or
    takes too long is a row with its error. With --device cpu it shows that everything works, and no speed. The exit
    status is 1 if anything but a peer could not be measured, 2 if the arguments or files are wrong.
    """
    if list_shards:
        _list_shards()
        return
    try:
        if is_merge:
            document = merge([read_document(path) for path in files])
            _write(output, document)
        else:
            settings = Settings(
                pipeline=pipeline or "flux", steps=steps, compiled=compiled, requests=requests, device=device
            )
            shards = [SHARDS[name] for name in names] or [_custom(settings, caps, peers)]
            document = _run([one.on(device) for one in shards], output, budget_s=budget_s, weights=weights)
        _show(document, old=old, plot=plot, timeline=timeline, pipeline=pipeline)
    except (OSError, ValueError, ResidencyError) as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)
    if any(row.get("error") and row["kind"] not in PEERS for run in document["runs"] for row in run["rows"]):
        sys.exit(1)


def _custom(settings: Settings, caps: str | None, peers: str) -> Shard:
    sizes = parse_caps(caps or CAPS[settings.pipeline])
    return Shard(name="custom", settings=settings, caps=sizes, peers=parse_peers(peers, sizes))


def _run(shards: list[Shard], output: Path, *, budget_s: float, weights: Path | None) -> Document:
    """Run shards one after the other, with the budget for all of them together."""
    # Whoever ends this command wants the weights removed and the worker process gone, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if any(shard.settings.device == "cpu" for shard in shards):
        click.echo("emulated device: times are modelled, and no figure says anything about speed")
    deadline = time.monotonic() + budget_s
    document: Document = {"format": FORMAT, "runs": []}
    by_pipeline: dict[str, list[Shard]] = {}
    for shard in shards:
        by_pipeline.setdefault(shard.settings.pipeline, []).append(shard)
    for pipeline, some in by_pipeline.items():
        # Weights are made once for all shards of a pipeline.
        with weights_folder(weights and weights / pipeline) as folder:
            for shard in some:
                click.echo(f"-- {shard.name}")
                run = Run(shard=shard, deadline=deadline, tell=click.echo, save=lambda _: _write(output, document))
                document["runs"].append(run.document)
                run_shard(run, folder)
    return document


def _show(
    document: Document, *, old: Path | None, plot: Path | None, timeline: Path | None, pipeline: str | None
) -> None:
    click.echo("\n".join(["", *tables(document)]))
    if old is not None:
        click.echo("\n".join(["## Compared with before", "", *compare(read_document(old), document)]))
    if plot is not None:
        plot.write_text(time_plot(figures(document), _group(document, pipeline)), encoding="utf-8")
    if timeline is not None:
        group = _group(document, pipeline)
        figure = worst(figures(document)).get(group)
        if figure is None:
            raise ValueError("no request of ours was profiled, so that there is no timeline to draw")
        timeline.write_text(timeline_plot(figure), encoding="utf-8")


def _group(document: Document, pipeline: str | None) -> Group:
    """Return the group that is drawn: the first one, of a pipeline if one is named."""
    groups = [group_of(run) for run in document["runs"]]
    found = [group for group in groups if pipeline in (None, group.pipeline)]
    if not found:
        raise ValueError(f"there are no results of {pipeline or 'any pipeline'} to draw")
    return found[0]


def _list_shards() -> None:
    for shard in SHARDS.values():
        peers = ", ".join(mode.name for mode in shard.peers) or "no peers"
        click.echo(f"{shard.name:<16} caps {', '.join(map(size_text, shard.caps))}; {peers}")


def _write(path: Path, document: Document) -> None:
    """Replace the results file, whole."""
    part = path.with_suffix(f"{path.suffix}.part")
    part.write_text(json.dumps(document, separators=(",", ":")), encoding="utf-8")
    part.replace(path)


if __name__ == "__main__":
    main()
