"""Graph networks of PyG: `BasicGNN` models, and every series of `MessagePassing` layers in a model.

A layer is a convolution, or the module that holds it, such as `DeepGCNLayer`. Its place "block" is the input of the
next layer, because norms, activations, dropout and residuals between the two are rarely modules of their own. For the
last layer it is the output; in a `BasicGNN` with jumping knowledge it is the input of `lin` in mode "last", or else the
output of the last norm, before the activation. Layers are assumed to run in the order in which the model lists them.
Convolutions within pooling layers are left out; heterogeneous models are not supported.
"""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch_geometric as pyg
from torch import Tensor, nn

from uncollapse.backbones import introspection, random_weights
from uncollapse.backbones.sites import OUTPUT, Block, Context, Site, Stack, join_path

Modules = Mapping[str, nn.Module]
EDGES = ("edge_index", "adj_t", "adj")  # the usual names of the graph


def stacks(model: nn.Module) -> tuple[Stack, ...]:
    """Return every series of graph convolutions in a model, one per module that runs some of them."""
    modules = dict(model.named_modules())
    convs = [path for path in modules if _is_layer(path, modules)]
    series: dict[str, list[str]] = {}
    for unit in dict.fromkeys(_unit(conv, convs, modules) for conv in convs):
        series.setdefault(_owner(unit, modules), []).append(unit)
    return tuple(_stack(owner, units, convs, modules) for owner, units in series.items())


def _is_layer(path: str, modules: Modules) -> bool:
    """Return whether it is a convolution of its own, not a part of a convolution, a pooling or a set of relations."""
    around = [modules[name] for name in _around(path)]
    is_part = any(isinstance(module, pyg.nn.MessagePassing) or _is_pooling(module) for module in around)
    is_relation = bool(around) and isinstance(around[0], nn.ModuleDict)
    return isinstance(modules[path], pyg.nn.MessagePassing) and not is_part and not is_relation


def _is_pooling(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch_geometric.nn.pool")


def _around(path: str) -> Iterator[str]:
    """Yield the names of the modules around a path, from the nearest to the model itself."""
    while path:
        path = path.rpartition(".")[0]
        yield path


def _unit(conv: str, convs: list[str], modules: Modules) -> str:
    """Return the layer of a convolution: the item of a list, or else what holds this convolution and no other."""
    unit = conv
    for name in _around(conv):
        if isinstance(modules[name], nn.ModuleList):
            return unit
        unit = name
    unit = conv
    for name in _around(conv):
        if not name or len(convs) == 1 or any(c.startswith(f"{name}.") for c in convs if c != conv):
            break
        unit = name
    return unit


def _owner(unit: str, modules: Modules) -> str:
    """Return the nearest module around a layer that has a forward pass."""
    return next((name for name in _around(unit) if not isinstance(modules[name], nn.ModuleList)), "")


def _stack(owner: str, units: list[str], convs: list[str], modules: Modules) -> Stack:
    own_convs = [[c for c in convs if c == unit or c.startswith(f"{unit}.")] for unit in units]
    model = modules[owner]
    outer = next((name for name in _around(owner) if _knows_batch(modules[name])), None)
    after = [*(Site(unit, "input") for unit in units[1:]), _last(owner, units[-1], modules)]
    blocks = []
    for number, (site, own) in enumerate(zip(after, own_convs, strict=True)):
        places = {OUTPUT: site, "conv.output": Site(own[0])} if len(own) == 1 else {OUTPUT: site}
        context = partial(_layer_context, introspection.argument_names(modules[own[0]]))
        blocks.append(Block(f"block {number}", own[0], places, context))
    return Stack(
        path=owner,
        family="pyg",
        architecture=type(model).__name__,
        blocks=tuple(blocks),
        embed=Site(units[0], "input"),
        final=Site(join_path(owner, "lin"), "input") if _jump_mode(model) not in (None, "last") else None,
        layout="nodes",
        context=partial(_context, _names(model)),
        needs_owner=True,
        arguments=_names(model) if "edge_index" in _names(model) or _takes_data(model) else (),
        outer=None if outer is None else (outer, partial(_context, _names(modules[outer]))),
        lacks_batch=outer is None and not _knows_batch(model),
        reinitialize=random_weights.reinitialize,
        facts={"layer": type(modules[own_convs[0][0]]).__name__},
    )


def _names(model: nn.Module) -> introspection.Names:
    if isinstance(model, pyg.nn.Sequential):  # its forward pass may take *args
        return tuple(model.signature.param_dict)
    return introspection.argument_names(model)


def _knows_batch(model: nn.Module) -> bool:
    return "batch" in _names(model) or _takes_data(model)


def _takes_data(model: nn.Module) -> bool:
    """Return whether it takes a graph as one object, which knows its batch: by name, by type, or as only argument."""
    names = _names(model)
    kinds = [
        p.annotation for p in inspect.signature(model.forward).parameters.values() if isinstance(p.annotation, type)
    ]
    return "data" in names or len(names) == 1 or any(issubclass(kind, pyg.data.Data) for kind in kinds)


def _jump_mode(model: nn.Module) -> str | None:
    """Return how a BasicGNN joins its layers; None if its last convolution is its output."""
    return model.jk_mode if isinstance(model, pyg.nn.models.basic_gnn.BasicGNN) else None


def _last(owner: str, unit: str, modules: Modules) -> Site:
    """Return the site of the output of the last layer."""
    match _jump_mode(modules[owner]):
        case None:
            return Site(unit)
        case "last":
            return Site(join_path(owner, "lin"), "input")
    return Site(join_path(owner, f"norms.{unit.rpartition('.')[2]}"))


def _context(names: introspection.Names, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Context:
    """Read the graph from the arguments, by name or from a `Data` object; None if a model uses another name."""
    given = introspection.bind_arguments(names, args, kwargs)
    data = next((value for value in given.values() if isinstance(value, pyg.data.Data)), None)
    if data is not None:
        given = data.to_dict()
    batch = given.get("batch")
    return Context(
        edge_index=next((edges for edges in map(_edges, map(given.get, EDGES)) if edges is not None), None),
        batch=batch if isinstance(batch, Tensor) else None,
    )


def _layer_context(names: introspection.Names, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Context:
    nodes = introspection.bind_arguments(names, args, kwargs).get("x")
    pair = "its nodes come as a pair of sources and targets (a bipartite or heterogeneous graph)"
    return replace(_context(names, args, kwargs), refuse=pair if isinstance(nodes, tuple | list) else "")


def _edges(graph: Any) -> Tensor | None:
    """Return the edges (2, E) from source to target of any form of a graph in PyG; sparse matrices are transposed."""
    if isinstance(graph, pyg.EdgeIndex):
        graph = graph.as_tensor()
    elif graph is not None and pyg.utils.is_sparse(graph):
        graph = pyg.utils.to_edge_index(graph)[0].flip(0)
    is_list = isinstance(graph, Tensor) and graph.dim() == 2 and len(graph) == 2 and not graph.is_floating_point()
    return graph if is_list else None
