"""A step in a CUDA graph."""

from collections.abc import Callable
from typing import TypeVar

import torch

Found = TypeVar("Found")


def captured(step: Callable[[], Found]) -> tuple[torch.cuda.CUDAGraph, Found]:
    """The graph, and where its results will be when it is played. The step has run before, on a
    stream of its own, so that kernels are compiled and libraries have their room."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    return graph, found
