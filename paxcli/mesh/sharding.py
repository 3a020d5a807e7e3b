"""Sharding of activations inside jit, of parameters and optimizer state, and of batches."""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import jax
from flax.core import meta
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from paxcli.errors import ConfigError
from paxcli.log import log
from paxcli.mesh.axes import BATCH_AXES
from paxcli.mesh.mesh import describe
from paxcli.mesh.rules import DEFAULT_RULES, Rules, spec

T = TypeVar("T")

_rules: contextvars.ContextVar[Rules] = contextvars.ContextVar("rules", default=DEFAULT_RULES)
_device: contextvars.ContextVar[Any] = contextvars.ContextVar("device", default=None)

_USUAL_MEMORIES = {"device", "pinned_host"}

# The tokenizer fixes the vocabulary size (a byte tokenizer has 259 ids); a recipe chooses every other size.
_MAY_REPLICATE = {"vocab"}


@contextlib.contextmanager
def use_mesh(mesh: jax.sharding.Mesh, rules: Rules = DEFAULT_RULES) -> Iterator[jax.sharding.Mesh]:
    """Sets the current mesh and rules of this thread, for `constrain` and for jit."""
    rules = _avoid_miscompilation(rules, mesh.shape)
    with set_during(_rules, rules), set_during(_device, mesh.devices.flat[0]), jax.set_mesh(mesh):
        yield mesh


@contextlib.contextmanager
def set_during(variable: contextvars.ContextVar[T], value: T) -> Iterator[None]:
    """Gives a context variable this value within a `with` block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def current_device() -> Any:
    """A device of the current mesh, or JAX's first device without a mesh. All devices of a mesh are of one kind.

    When compiling ahead of time, it is not attached to this machine.
    """
    return _device.get() or jax.devices()[0]


def _avoid_miscompilation(rules: Rules, sizes: Mapping[str, int]) -> Rules:
    """Replicates `activation_embed` over `tensor` on meshes where XLA would compute wrong values.

    With `data` > 1 and `fsdp` as large as `tensor`, XLA's partitioner (jaxlib 0.10.2 and 0.12.0, on CPU) gives wrong
    values for a matmul, [B, T, F] × [F, D], that contracts over `tensor` and whose result is sharded over (data, fsdp)
    and `tensor`, forward or backward; openxla/xla#40034 reports a similar fault on GPUs. The result is correct with D
    unsharded, and on every other mesh. The residual stream, which each layer saves for the backward pass, is not a
    matmul output and stays sharded. A matmul whose input has no constraint of its own is not safe: inside the loop of
    gradient accumulation XLA then shards D over `tensor` again.
    """
    if not (sizes["data"] > 1 and sizes["fsdp"] == sizes["tensor"] > 1 and "tensor" in rules["activation_embed"]):
        return rules
    message = "Mesh fsdp=%d × tensor=%d: matmul outputs are not sharded over `tensor` along `activation_embed`."
    log.info(message, sizes["fsdp"], sizes["tensor"])
    return {**rules, "activation_embed": tuple(axis for axis in rules["activation_embed"] if axis != "tensor")}


def memory_kinds() -> set[str]:
    """The memory spaces of the current mesh's devices; device and pinned host memory without a mesh."""
    device = _device.get()
    if device is None:
        return _USUAL_MEMORIES
    try:
        return {memory.kind for memory in device.addressable_memories()}
    except jax.errors.JaxRuntimeError:  # an ahead-of-time compilation target, not attached to this machine
        return _USUAL_MEMORIES


def constrain(x: jax.Array, *logical_axes: str | None) -> jax.Array:
    """Shards `x` by its logical axes over the current mesh; returns `x` unchanged without a mesh or on one device.

    A dimension is sharded over its first mesh axes, as many as divide it evenly: some activations have odd sizes (the
    last batch of an evaluation, a prompt), and sharding does not change their values.
    """
    sharding = layout(x.shape, *logical_axes)
    return x if sharding is None else jax.lax.with_sharding_constraint(x, sharding)


def layout(shape: tuple[int, ...], *logical_axes: str | None) -> PartitionSpec | None:
    """The PartitionSpec that `constrain` applies to an array of this shape; None if it leaves the array unchanged."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return None
    if len(logical_axes) != len(shape):
        raise ValueError(f"{len(logical_axes)} logical axes {logical_axes} for an array of shape {shape}")
    kinds = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    sizes = {axis: size for axis, size, kind in kinds if kind == AxisType.Auto and size > 1}
    if not sizes:  # inside shard_map
        return None
    entries = []
    for dim, entry in zip(shape, spec(logical_axes, _rules.get()), strict=True):
        axes = tuple(axis for axis in axes_of(entry) if axis in sizes)
        while dim % _num_shards(axes, sizes):
            axes = axes[:-1]
        entries.append(axes or None)
    return PartitionSpec(*entries)


def split(shape: tuple[int, ...], *logical_axes: str | None) -> tuple[int, ...]:
    """The number of shards of each dimension after `constrain` of an array of this shape."""
    sharding = layout(shape, *logical_axes)
    if sharding is None:
        return (1,) * len(shape)
    return tuple(_num_shards(axes_of(entry), jax.sharding.get_abstract_mesh().shape) for entry in sharding)


def vmap_along(logical_axis: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    """`jax.vmap` of a `fn` that calls `constrain`, with the mapped dimension sharded like `logical_axis`.

    The mesh axes of `logical_axis` must divide the mapped dimension; inside `fn` they shard no other dimension.
    """
    axes = _rules.get()[logical_axis]

    def call(*args: Any) -> Any:
        with without_sharding_over(*axes):
            return fn(*args)

    return jax.vmap(call, spmd_axis_name=axes or None)


def without_sharding_over(*mesh_axes: str) -> contextlib.AbstractContextManager[None]:
    """Within this context, `constrain` shards nothing over these mesh axes."""
    rules = {name: tuple(axis for axis in axes if axis not in mesh_axes) for name, axes in _rules.get().items()}
    return set_during(_rules, rules)


def param_shardings(mesh: jax.sharding.Mesh, rules: Rules, params: Any) -> Any:
    """The NamedSharding of every parameter.

    Args:
      mesh: The device mesh.
      rules: Logical to mesh axes.
      params: Abstract parameters, boxed by `nn.with_logical_partitioning`. An unboxed parameter is replicated.

    Returns:
      A tree like `params`, without boxes.

    Raises:
      ConfigError: The mesh axes do not divide a dimension. A `vocab` dimension is replicated and logged instead.
    """

    def sharding(path: Any, leaf: Any) -> NamedSharding:
        if not is_partitioned(leaf):
            return NamedSharding(mesh, PartitionSpec())
        name, shape, sizes = name_of(path), leaf.value.shape, mesh.shape
        if len(leaf.names) != len(shape):
            raise ValueError(f"{name}: {len(leaf.names)} logical axes {leaf.names} for shape {shape}")
        entries = list(spec(leaf.names, rules))
        for index, (logical, dim) in enumerate(zip(leaf.names, shape, strict=True)):
            axes = axes_of(entries[index])
            if dim % (num_shards := _num_shards(axes, sizes)) == 0:
                continue
            over = " × ".join(f"{axis}={sizes[axis]}" for axis in axes)
            if logical not in _MAY_REPLICATE:
                raise ConfigError(
                    f"Parameter `{name}`: its dimension `{logical}` of {dim} does not divide over {over}.",
                    f"Choose a size that is a multiple of {num_shards}, a smaller `{axes[-1]}` axis (--set "
                    f"mesh.ici_mesh_shape=…), or replicate it: --set mesh.logical_axis_rules='{{{logical}: null}}'",
                )
            log.info("Parameter `%s`: `%s` of %d does not divide over %s: replicated.", name, logical, dim, over)
            entries[index] = None
        return NamedSharding(mesh, PartitionSpec(*entries))

    return jax.tree_util.tree_map_with_path(sharding, params, is_leaf=is_partitioned)


def shardings_like_params(tree: Any, params: Any, shardings: Any, mesh: jax.sharding.Mesh) -> Any:
    """Shardings for a tree with copies of the parameters, such as an optimizer state or a train state.

    A leaf whose path ends in a parameter's path is sharded like that parameter if it has the same shape, or the shape
    without one dimension (a factored second moment). Every other leaf, such as a step count, is replicated.
    """
    param_shapes = {path_of(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    by_path = {path_of(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(shardings)}

    def sharding(path: Any, leaf: Any) -> NamedSharding:
        names = path_of(path)
        for start in range(len(names)):
            shape = param_shapes.get(names[start:])
            if shape == leaf.shape:
                return by_path[names[start:]]
            if shape is not None:
                return NamedSharding(mesh, _drop_dimension(shape, by_path[names[start:]].spec, leaf.shape))
        return NamedSharding(mesh, PartitionSpec())

    return jax.tree_util.tree_map_with_path(sharding, tree)


def _drop_dimension(shape: tuple[int, ...], spec: PartitionSpec, smaller: tuple[int, ...]) -> PartitionSpec:
    """The spec for `smaller`, which is `shape` without one dimension (the last possible one); replicated otherwise."""
    entries = (*spec, *(None for _ in shape[len(spec) :]))
    for dim in reversed(range(len(shape))):
        if shape[:dim] + shape[dim + 1 :] == smaller:
            return PartitionSpec(*entries[:dim], *entries[dim + 1 :])
    return PartitionSpec()


def path_of(path: Any) -> tuple[str, ...]:
    """The keys of a JAX key path as strings, for any container types."""
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


def name_of(path: Any) -> str:
    """A JAX key path as a dotted name: `stack.layers.feed_forward.w_in`."""
    return ".".join(path_of(path))


def batch_sharding(mesh: jax.sharding.Mesh) -> NamedSharding:
    """Shards the batch dimension over `data`, `fsdp` and `expert`; every other dimension is unsharded."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def put_batch(batch: Any, mesh: jax.sharding.Mesh) -> Any:
    """Builds global arrays on the mesh from this process's rows `[B, …]` of each array.

    Raises:
      ConfigError: The mesh does not divide the global batch.
    """
    sharding = batch_sharding(mesh)
    hosts, _ = infeed_shard(mesh)
    num_shards = _num_shards(BATCH_AXES, mesh.shape)
    rows = {leaf.shape[0] * hosts for leaf in jax.tree.leaves(batch)}
    if any(count % num_shards for count in rows):
        over = describe({axis: mesh.shape[axis] for axis in BATCH_AXES})
        hint = f"Choose a global_batch_size that is a multiple of {num_shards}, or a smaller mesh."
        raise ConfigError(f"A global batch of {min(rows)} examples does not divide over {over}.", hint)
    return jax.tree.map(lambda leaf: jax.make_array_from_process_local_data(sharding, leaf), batch)


def global_spec(spec: Any, rows: int, mesh: jax.sharding.Mesh) -> Any:
    """Shapes, dtypes and shardings of the global batches of `rows` rows that `put_batch` makes of those with `spec`."""
    sharding = batch_sharding(mesh)
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype, sharding=sharding), spec)


def infeed_shard(mesh: jax.sharding.Mesh) -> tuple[int, int]:
    """The number of input shards of the global batch, and the index of this process's shard.

    Processes that hold the same examples (for example when the `tensor` axis spans hosts) read the same shard.
    """
    if jax.process_count() == 1:
        return 1, 0
    rows_of: dict[int, set[int]] = {}
    for device, (row,) in batch_sharding(mesh).devices_indices_map((_num_shards(BATCH_AXES, mesh.shape),)).items():
        rows_of.setdefault(device.process_index, set()).add(row.start or 0)
    parts = sorted({tuple(sorted(rows)) for rows in rows_of.values()})
    if sum(map(len, parts)) != len(set().union(*parts)):
        problem = "The examples of some processes of this mesh overlap only partly, so the input cannot be sharded."
        raise ConfigError(problem, "Choose a mesh whose `tensor` axis fits in a host or spans complete hosts.")
    return len(parts), parts.index(tuple(sorted(rows_of[jax.process_index()])))


def is_partitioned(leaf: Any) -> bool:
    """Whether `leaf` is an array boxed with its logical axes (Flax's `Partitioned`)."""
    return isinstance(leaf, meta.Partitioned)


def axes_of(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes in one entry of a PartitionSpec."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def _num_shards(axes: tuple[str, ...], sizes: Mapping[str, int]) -> int:
    return math.prod(sizes[axis] for axis in axes)
