"""The pictures are XML that shows what the figures say."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.request_time_figures import figures, group_of, worst
from benchmarks.request_time_plot import time_plot, timeline_plot

SVG = "{http://www.w3.org/2000/svg}"


def texts(picture: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(picture).iter(f"{SVG}text")]


def test_time_against_cap_shows_bound_ours_peers_and_resident(document: Any) -> None:
    group = group_of(document["runs"][0])

    picture = time_plot(figures(document), group)

    said = texts(picture)
    assert {"residency", "best bound", "group-leaf", "group-block", "24GiB", "8GiB"} <= set(said)
    assert "all resident, no cap 1.00 s" in said
    circles = list(ElementTree.fromstring(picture).iter(f"{SVG}circle"))
    assert len(circles) == 2 + 2 + 1 + 1  # ours and its bound at two caps, two peers at one


def test_a_slower_request_is_drawn_higher(document: Any) -> None:
    picture = time_plot(figures(document), group_of(document["runs"][0]))
    dots = [one for one in ElementTree.fromstring(picture).iter(f"{SVG}circle") if one.get("fill") == "#0072b2"]

    at_8, at_24 = sorted(dots, key=lambda dot: float(dot.get("cx", "0")))
    assert float(at_8.get("cy", "0")) < float(at_24.get("cy", "0"))


def test_nothing_to_draw_is_an_error(make: Any, row: Any) -> None:
    document = make(row("resident", None, [1.0]))

    with pytest.raises(ValueError, match="nothing to draw"):
        time_plot(figures(document), group_of(document["runs"][0]))


def test_the_timeline_shows_copies_and_computing_of_the_worst_request(document: Any) -> None:
    (figure,) = worst(figures(document)).values()

    said = texts(timeline_plot(figure))

    assert said[0].startswith("ours@8GiB of flux: computes and copies 45 ms, only computes 20, only copies 30")
    assert "100 ms" in said
