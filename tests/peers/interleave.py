# SPDX-License-Identifier: Apache-2.0
"""Median times of several functions whose CUDA graphs are replayed in turns, on one stream that is never idle."""

import math
import statistics

import torch

WARM_MS = 60.0
"""The graphs of one measurement run this long before the first timed replay, so that clocks and power settle."""
REPLAYS = 7
"""The number of timed replays per graph."""
GRAPH_US = 400.0
"""The shortest time that the calls of one graph take together, in microseconds, at the given lower bound of a call."""

STREAM = torch.cuda.Stream()
_anchor = torch.cuda.CUDAGraph()
"""An empty graph that keeps the memory pool of all graphs alive; they never run at the same time, so they share it."""
with torch.cuda.graph(_anchor, stream=STREAM):
    torch.zeros(1, device="cuda")


class Graph:
    """A CUDA graph of calls in turns.

    Attributes:
        length: number of calls.
    """

    def __init__(self, calls, length):
        self.length = length
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(STREAM):
            self._graph.capture_begin(pool=_anchor.pool(), capture_error_mode="relaxed")
            try:
                # Outputs live as long as the graph, so that every call writes memory of its own.
                self._outputs = [calls[i % len(calls)]() for i in range(length)]
            finally:
                self._graph.capture_end()
        self.replay = self._graph.replay


def graph_length(least_us, out_bytes, most):
    """Return the number of calls of at least `least_us` that make a graph of GRAPH_US, with at most 1 GB of outputs."""
    return max(2, min(most, math.ceil(GRAPH_US / least_us), int(1e9 / max(out_bytes, 1))))


def medians_us(graphs):
    """Return the median microseconds of one call of each graph; all replays are queued before the first one ends."""

    def event():
        mark = torch.cuda.Event(enable_timing=True)
        mark.record(STREAM)
        return mark

    def replay():
        for graph in graphs:
            graph.replay()

    with torch.cuda.stream(STREAM):
        begin = event()
        replay()
        end = event()
        end.synchronize()
        for _ in range(math.ceil(WARM_MS / begin.elapsed_time(end))):
            replay()
        marks = [event()]
        for _ in range(REPLAYS):
            for graph in graphs:
                graph.replay()
                marks.append(event())
        marks[-1].synchronize()
    count = len(graphs)
    return [
        statistics.median(marks[j].elapsed_time(marks[j + 1]) for j in range(i, count * REPLAYS, count))
        / graph.length
        * 1e3
        for i, graph in enumerate(graphs)
    ]
