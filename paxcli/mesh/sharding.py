"""How arrays lie on the mesh: activations inside jit, parameters and what follows them, batches."""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from flax.core import meta
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from paxcli.errors import ConfigError
from paxcli.log import log
from paxcli.mesh.axes import BATCH_AXES
from paxcli.mesh.mesh import describe
from paxcli.mesh.rules import DEFAULT_RULES, Rules, spec

_rules: contextvars.ContextVar[Rules] = contextvars.ContextVar("rules", default=DEFAULT_RULES)
_device: contextvars.ContextVar[Any] = contextvars.ContextVar("device", default=None)

_USUAL_MEMORIES = {"device", "pinned_host"}

# Vocabularies come as they are (a byte tokenizer has 259 ids); every other size is the recipe's to choose.
_MAY_REPLICATE = {"vocab"}


@contextlib.contextmanager
def use_mesh(mesh: jax.sharding.Mesh, rules: Rules = DEFAULT_RULES) -> Iterator[jax.sharding.Mesh]:
    """Makes `mesh` and `rules` the current ones of this thread, for `constrain` and for jit."""
    token = _rules.set(_without_miscompiled(rules, mesh.shape))
    device_token = _device.set(mesh.devices.flat[0])
    try:
        with jax.set_mesh(mesh):
            yield mesh
    finally:
        _device.reset(device_token)
        _rules.reset(token)


def current_device() -> Any:
    """One device of the current mesh, which need not be here: a program may be compiled for others. JAX's own if none.

    All devices of a mesh are of one kind.
    """
    return _device.get() or jax.devices()[0]


def _without_miscompiled(rules: Rules, sizes: Mapping[str, int]) -> Rules:
    """The rules that XLA compiles rightly on this mesh.

    With `data` > 1 and `fsdp` as large as `tensor`, XLA's partitioner (jaxlib 0.10.2, on CPU) gives wrong values for a
    product that contracts over `tensor` and whose result is sharded over (data, fsdp) and `tensor`: [B, T, F] × [F, D],
    forward or backward. With D whole it is right, as it is on every other mesh. The residual, which is what the
    backward pass keeps of each layer, is no product, and stays cut.
    """
    if not (sizes["data"] > 1 and sizes["fsdp"] == sizes["tensor"] > 1 and "tensor" in rules["activation_embed"]):
        return rules
    log.info("On a mesh of fsdp=%d and tensor=%d products keep `embed` whole.", sizes["fsdp"], sizes["tensor"])
    return {**rules, "activation_embed": tuple(axis for axis in rules["activation_embed"] if axis != "tensor")}


def memory_kinds() -> set[str]:
    """The memories that the devices of the current mesh can use; JAX's usual ones where there is no mesh."""
    device = _device.get()
    if device is None:
        return _USUAL_MEMORIES
    try:
        return {memory.kind for memory in device.addressable_memories()}
    except jax.errors.JaxRuntimeError:  # a device to compile for, which is not here; it has JAX's usual memories
        return _USUAL_MEMORIES


def constrain(x: jax.Array, *logical_axes: str | None) -> jax.Array:
    """`x` laid out by its logical axes under the current mesh; `x` itself without a mesh or on one device.

    A dimension is laid over as many of its mesh axes, from the first on, as divide it: activations come in odd sizes
    (the last batch of an evaluation, a prompt), and their layout changes no value.
    """
    laid_out = layout(x.shape, *logical_axes)
    return x if laid_out is None else jax.lax.with_sharding_constraint(x, laid_out)


def layout(shape: tuple[int, ...], *logical_axes: str | None) -> PartitionSpec | None:
    """How `constrain` would lay out an array of this shape; None where it would leave it alone."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return None
    if len(logical_axes) != len(shape):
        raise ValueError(f"{len(logical_axes)} logical axes {logical_axes} for an array of shape {shape}")
    kinds = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    sizes = {axis: size for axis, size, kind in kinds if kind == AxisType.Auto}
    if not sizes:  # inside shard_map
        return None
    entries = []
    for dim, entry in zip(shape, spec(logical_axes, _rules.get()), strict=True):
        axes = tuple(axis for axis in axes_of(entry) if axis in sizes)
        while dim % _ways(axes, sizes):
            axes = axes[:-1]
        entries.append(axes or None)
    return PartitionSpec(*entries)


def split(shape: tuple[int, ...], *logical_axes: str | None) -> tuple[int, ...]:
    """Into how many parts `constrain` would cut each dimension of an array of this shape."""
    laid_out = layout(shape, *logical_axes)
    if laid_out is None:
        return (1,) * len(shape)
    sizes = jax.sharding.get_abstract_mesh().shape
    return tuple(_ways(axes_of(entry), sizes) for entry in laid_out)


def map_along(logical_axis: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    """`jax.vmap` of a `fn` that calls `constrain`: there, the mapped dimension lies as `logical_axis` does.

    No other dimension inside lies on its mesh axes, which must divide it.
    """
    axes = _rules.get()[logical_axis]

    def constrained(*args: Any) -> Any:
        with whole_along(*axes):
            return fn(*args)

    return jax.vmap(constrained, spmd_axis_name=axes or None)


@contextlib.contextmanager
def whole_along(*mesh_axes: str) -> Iterator[None]:
    """Inside, `constrain` lays nothing over these mesh axes."""
    rules = {name: tuple(axis for axis in axes if axis not in mesh_axes) for name, axes in _rules.get().items()}
    token = _rules.set(rules)
    try:
        yield
    finally:
        _rules.reset(token)


def param_shardings(mesh: jax.sharding.Mesh, rules: Rules, params: Any) -> Any:
    """The NamedSharding of every parameter.

    Args:
      mesh: The device mesh.
      rules: Logical to mesh axes.
      params: Abstract parameters, boxed by `nn.with_logical_partitioning`. One without a box is replicated.

    Returns:
      A tree like `params` without its boxes.

    Raises:
      ConfigError: A dimension that its mesh axes do not divide. A `vocab` dimension is replicated instead, and logged.
    """

    def sharding(path: Any, leaf: Any) -> NamedSharding:
        if not is_box(leaf):
            return NamedSharding(mesh, PartitionSpec())
        return NamedSharding(mesh, _param_spec(name_of(path), leaf.value.shape, leaf.names, rules, mesh.shape))

    return jax.tree_util.tree_map_with_path(sharding, params, is_leaf=is_box)


def unbox(params: Any) -> Any:
    """`params` without Flax's boxes."""
    return jax.tree.map(lambda leaf: leaf.value if is_box(leaf) else leaf, params, is_leaf=is_box)


def like_params(tree: Any, params: Any, shardings: Any, mesh: jax.sharding.Mesh) -> Any:
    """Shardings for a tree that holds copies of the parameters, such as an optimizer state or a whole train state.

    A leaf whose path ends in a parameter's path lies as the parameter does if it has its shape, or its shape without
    one dimension, as a factored moment has. Everything else is replicated, step counts for example.
    """
    table = {path_of(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    placed = {path_of(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(shardings)}

    def sharding(path: Any, leaf: Any) -> NamedSharding:
        names = path_of(path)
        for start in range(len(names)):
            shape = table.get(names[start:])
            if shape == leaf.shape:
                return placed[names[start:]]
            if shape is not None:
                return NamedSharding(mesh, _without_one(shape, placed[names[start:]].spec, leaf.shape))
        return NamedSharding(mesh, PartitionSpec())

    return jax.tree_util.tree_map_with_path(sharding, tree)


def _without_one(shape: tuple[int, ...], spec: PartitionSpec, smaller: tuple[int, ...]) -> PartitionSpec:
    """The spec of an array whose shape is `shape` less one dimension, the last that it can be; else of a whole one."""
    entries = (*spec, *(None for _ in shape[len(spec) :]))
    for dim in reversed(range(len(shape))):
        if shape[:dim] + shape[dim + 1 :] == smaller:
            return PartitionSpec(*entries[:dim], *entries[dim + 1 :])
    return PartitionSpec()


def path_of(path: Any) -> tuple[str, ...]:
    """The names along a JAX key path, whatever the containers."""
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


def name_of(path: Any) -> str:
    """A JAX key path as one dotted name: `decoder.layers.mlp.kernel`."""
    return ".".join(path_of(path))


def batch_sharding(mesh: jax.sharding.Mesh) -> NamedSharding:
    """Examples over `data`, `fsdp` and `expert`, everything else whole."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def put_batch(batch: Any, mesh: jax.sharding.Mesh) -> Any:
    """This process's rows `[B, …]` of each array, as global arrays on the mesh.

    Raises:
      ConfigError: The global batch does not divide over the mesh.
    """
    sharding = batch_sharding(mesh)
    hosts, _ = infeed_shard(mesh)
    ways = _ways(BATCH_AXES, mesh.shape)
    rows = {leaf.shape[0] * hosts for leaf in jax.tree.leaves(batch)}
    if any(count % ways for count in rows):
        raise ConfigError(
            f"A global batch of {min(rows)} examples does not divide over "
            f"{describe({axis: mesh.shape[axis] for axis in BATCH_AXES})}.",
            f"Choose a global_batch_size that is a multiple of {ways}, or a smaller mesh.",
        )
    return jax.tree.map(lambda leaf: jax.make_array_from_process_local_data(sharding, leaf), batch)


def global_spec(spec: Any, global_batch_size: int, mesh: jax.sharding.Mesh) -> Any:
    """What `put_batch` will return for batches of this process's `spec`: shapes, dtypes and shardings."""
    sharding = batch_sharding(mesh)
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((global_batch_size, *leaf.shape[1:]), leaf.dtype, sharding=sharding), spec
    )


def infeed_shard(mesh: jax.sharding.Mesh) -> tuple[int, int]:
    """How many different parts of the global batch the processes read, and which one this process reads.

    Processes that hold the same examples (a `tensor` axis across hosts, say) read the same part.
    """
    if jax.process_count() == 1:
        return 1, 0
    batch_dims = [mesh.axis_names.index(axis) for axis in BATCH_AXES]
    rows_of: dict[int, set[int]] = {}
    for position, device in np.ndenumerate(mesh.devices):
        row = np.ravel_multi_index([position[dim] for dim in batch_dims], [mesh.shape[axis] for axis in BATCH_AXES])
        rows_of.setdefault(device.process_index, set()).add(int(row))
    parts = sorted({tuple(sorted(rows)) for rows in rows_of.values()})
    if sum(map(len, parts)) != len(set().union(*parts)):
        raise ConfigError(
            "The processes of this mesh share some of their examples but not all, so no input can feed them.",
            "Give each process whole rows: put `tensor` inside a host, or a whole number of hosts on it.",
        )
    return len(parts), parts.index(tuple(sorted(rows_of[jax.process_index()])))


def is_box(leaf: Any) -> bool:
    """Whether it is an array with the logical axes that Flax keeps beside it."""
    return isinstance(leaf, meta.Partitioned)


def _param_spec(
    name: str, shape: tuple[int, ...], logical_axes: tuple[str | None, ...], rules: Rules, sizes: Mapping[str, int]
) -> PartitionSpec:
    if len(logical_axes) != len(shape):
        raise ValueError(f"{name}: {len(logical_axes)} logical axes {logical_axes} for shape {shape}")
    entries = []
    for logical, dim, entry in zip(logical_axes, shape, spec(logical_axes, rules), strict=True):
        axes = axes_of(entry)
        ways = _ways(axes, sizes)
        if dim % ways == 0:
            entries.append(entry)
            continue
        over = " × ".join(f"{axis}={sizes[axis]}" for axis in axes)
        if logical not in _MAY_REPLICATE:
            raise ConfigError(
                f"Parameter `{name}`: its dimension `{logical}` of {dim} does not divide over {over}.",
                f"Choose a size that is a multiple of {ways}, a smaller `{axes[-1]}` axis (--set "
                f"mesh.ici_mesh_shape=…), or keep it whole: --set mesh.logical_axis_rules='{{{logical}: null}}'",
            )
        log.info("Parameter `%s`: `%s` of %d does not divide over %s: replicated.", name, logical, dim, over)
        entries.append(None)
    return PartitionSpec(*entries)


def axes_of(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes in one entry of a PartitionSpec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _ways(axes: tuple[str, ...], sizes: Mapping[str, int]) -> int:
    return math.prod(sizes[axis] for axis in axes)
