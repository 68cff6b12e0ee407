# SPDX-License-Identifier: Apache-2.0
"""Median times of CUDA graphs that are replayed round-robin on one stream, without idle times in between."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

WARM_MS = 60.0
"""The milliseconds for which the graphs run before the first timed replay, so that clocks and power settle."""
REPLAYS = 7
"""The number of timed replays per graph."""
GRAPH_US = 400.0
"""The shortest time of a graph, in microseconds, if every call takes as long as its lower bound."""
MAX_CALLS = 160
"""The largest number of calls per graph."""
OUTPUT_BYTES = 1e9
"""The largest total size in bytes of the outputs of a graph; a graph of two calls may exceed it."""


class Graph(NamedTuple):
    """A captured CUDA graph of several calls of one function, whose time per call is measured.

    Attributes:
        replay: the function that launches the graph.
        length: the number of calls in the graph.
    """

    replay: Callable[[], object]
    length: int


def graph_length(least_us: float, out_bytes: int) -> int:
    """Return the number of calls for one graph, if a call takes at least ``least_us`` and writes ``out_bytes``.

    >>> graph_length(100.0, 1 << 20), graph_length(2.2, 1 << 10), graph_length(5000.0, 1 << 30)
    (4, 160, 2)
    """
    return max(2, min(MAX_CALLS, math.ceil(GRAPH_US / least_us), int(OUTPUT_BYTES / out_bytes)))


def medians_us(
    graphs: Sequence[Graph], mark: Callable[[], Any], elapsed_ms: Callable[[Any, Any], float]
) -> list[float]:
    """Return the median microseconds of one call of each graph.

    All replays are queued before the first one ends: an event that is recorded on an idle stream would count the time
    that the CPU takes to launch the next graph.

    Args:
        graphs: the graphs, which are replayed in this order.
        mark: the function that records an event with the method ``synchronize`` on the stream and returns the event.
        elapsed_ms: the function that returns the milliseconds between two events.
    """

    def replay() -> list[Any]:
        marks = []
        for graph in graphs:
            graph.replay()
            marks.append(mark())
        return marks

    begin, end = replay()[-1], replay()[-1]
    end.synchronize()
    for _ in range(math.ceil(WARM_MS / elapsed_ms(begin, end))):
        last = replay()[-1]
    marks = [last]
    for _ in range(REPLAYS):
        marks += replay()
    marks[-1].synchronize()
    times = [elapsed_ms(*pair) for pair in itertools.pairwise(marks)]
    return [statistics.median(times[i :: len(graphs)]) / graph.length * 1e3 for i, graph in enumerate(graphs)]
