"""Cures that act on the edges of a graph, among the arguments of a model."""

from typing import Any

import torch
from torch import Tensor, nn

OF_EDGES = ("edge_weight", "edge_attr", "edge_type")  # what goes with the edges, entry by entry


class EdgeWriter:
    """Changes the edges that a model is called with.

    Args:
        cure: takes the edges and something of each of them, and gives both for those that are left.
        names: of the model's arguments.
    """

    def __init__(self, cure: nn.Module, names: tuple[str, ...]) -> None:
        self.cure, self.names = cure, names

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with the edges that are left, in training."""
        if not self.cure.training:
            return args, kwargs
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        data = next((value for value in given.values() if hasattr(value, "edge_subgraph")), None)
        if given.get("num_sampled_edges_per_hop") is not None:
            raise ValueError("DropEdge changes how many edges there are: call the model without the numbers per hop.")
        if data is not None and data.edge_index is None:
            raise ValueError("DropEdge needs edge_index (2, E), and the Data object has none.")
        if data is not None:
            kept = self._kept(data.edge_index, getattr(data, "batch", None))
            changed = {id(data): data.edge_subgraph(kept)}
        else:
            changed = self._thinned(given)
        new = tuple(changed.get(id(value), value) for value in args)
        return new, {name: changed.get(id(value), value) for name, value in kwargs.items()}

    def _thinned(self, given: dict[str, Any]) -> dict[int, Any]:
        edges = given.get("edge_index")
        if not isinstance(edges, Tensor) or edges.layout != torch.strided:
            raise ValueError(f"DropEdge needs edge_index as a tensor (2, E), got {type(edges).__name__}.")
        kept = self._kept(edges, given.get("batch"))
        rows = {id(given[name]): given[name][kept] for name in OF_EDGES if isinstance(given.get(name), Tensor)}
        return {id(edges): edges[:, kept], **rows}

    def _kept(self, edges: Tensor, batch: Tensor | None) -> Tensor:
        """Which of the edges (2, E) are left, as numbers."""
        kept: Tensor = self.cure(edges, torch.arange(edges.shape[1], device=edges.device), batch=batch)[1]
        return kept
