"""Starts a run from a checkpoint of paxml: parameters, Adam's moments and counts, moving averages, and the step.

paxml writes a directory `checkpoint_00000003` per step. Its arrays are zarr folders, an OCDBT database of zarr arrays,
or, from the pmap trainer, one flax msgpack file. The checkpoint does not describe its model: the recipe does.
"""

from __future__ import annotations

import ast
import functools
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote

import flax.serialization
import jax
import numpy as np
import tensorstore
from etils import epath

from paxcli.checkpoint.array_differences import ArrayType
from paxcli.checkpoint.reading import listing, named_leaves
from paxcli.config.paths import resolve_path
from paxcli.convert.layout import Kind, LastKept, Layers, Layout, Rule, Source, layer_rule, pax_layers
from paxcli.convert.runs import ExperimentConfig, ImportedWeights, PathLike, import_checkpoint
from paxcli.convert.steps import transpose, unstack
from paxcli.errors import DataError, first_line
from paxcli.log import log
from paxcli.training.session import state_shapes

_STEP = re.compile(r"checkpoint_(\d+)")
_IN_LAYER = re.compile(r"transformer\.(repeat\.sub\.|pipeline\.body\.)?x_layers_(\d+)\.(.+)")
_PARAMETER = re.compile(r"(?:mdl_vars|opt_states[._].*?[._](?P<kind>m|v|ema))\.params\.(?:lm\.)?(?P<name>.+)")
_KINDS: dict[str | None, Kind] = {None: "params", "m": "mu", "v": "nu", "ema": "ema"}
_QKV = ("query", "key", "value")


class PaxmlCheckpoint:
    """A checkpoint that paxml wrote: a `ForeignCheckpoint`. Its names begin below `params.lm.`.

    Args:
      directory: The directory of a step, of all steps, or of the run.

    Raises:
      DataError: There is no checkpoint, or it cannot be read.
    """

    def __init__(self, directory: PathLike):
        if (path := find_paxml(directory)) is None:
            hint = "Give a directory such as …/checkpoint_00001000."
            raise DataError(f"{directory} holds no checkpoint of paxml.", hint)
        self.path, state = path, path / "state"
        try:
            leaves = _msgpack_arrays(state / "checkpoint") if (state / "checkpoint").exists() else _zarr_arrays(state)
            self.step = int(np.asarray(leaves["step"]))
            counts = [np.asarray(x) for name, x in leaves.items() if name.endswith("count")]
        except (OSError, ValueError, KeyError, SyntaxError) as error:
            raise DataError(f"{self.path} cannot be read: {first_line(error)}.", "Restore it from a copy.") from error
        numbers = {int(number) for count in counts for number in count.ravel()}  # repeated layers have one each
        if len(numbers) > 1:
            problem = f"The optimizers in {self.path} made different numbers of updates: {sorted(numbers)}."
            raise DataError(problem, "Choose another step of this run.")
        self.count = max(numbers, default=None)
        self._leaves: dict[Kind, dict[str, Any]] = {kind: {} for kind in _KINDS.values()}
        for name, leaf in leaves.items():
            if found := _PARAMETER.fullmatch(name):
                self._leaves[_KINDS[found["kind"]]][found["name"]] = leaf

    def arrays(self, kind: Kind = "params") -> dict[str, ArrayType]:
        """Name -> shape and dtype of each array of a kind."""
        leaves = self._leaves[kind].items()
        return {name: jax.ShapeDtypeStruct(x.shape, getattr(x.dtype, "numpy_dtype", x.dtype)) for name, x in leaves}

    def reader(self, kind: Kind = "params") -> Source:
        """Reads these arrays into host memory."""
        return LastKept(lambda name: np.asarray(self._leaves[kind][name]))


def find_paxml(directory: PathLike) -> epath.Path | None:
    """The directory of a step: this one, or that of the latest step in it; None if there is none."""
    folder = epath.Path(resolve_path(directory))
    parents = [parent for parent in (folder, folder / "checkpoints") if parent.is_dir()]
    folders = (folder, *(path for parent in parents for path in parent.iterdir()))
    named = [(int(found[1]), path) for path in folders if (found := _STEP.fullmatch(path.name))]
    steps = {step: path for step, path in named if (path / "state").is_dir()}
    return steps[max(steps)] if steps else None


def import_paxml(
    config: ExperimentConfig, recipe: str, family: str, source: PathLike, run_dir: PathLike, dry_run: bool = False
) -> ImportedWeights:
    """Starts a run from a checkpoint of paxml: training resumes at its step, with its data from the beginning.

    Args:
      config: The recipe of the same model and optimizer.
      recipe: The same as YAML.
      family: The recipe's name.
      source: The checkpoint.
      run_dir: A run without checkpoints.
      dry_run: Whether only to compare names and shapes.

    Raises:
      DataError: The checkpoint is damaged, or not of this model.
      ConfigError: The run has checkpoints, or its optimizer keeps something that Adam does not.
      MissingError: The run cannot be written.
    """
    checkpoint, shapes = PaxmlCheckpoint(source), state_shapes(config)
    params = named_leaves(shapes.params)
    layout = paxml_layout(checkpoint.arrays(), pax_layers(params, config.task.model.num_layers), "head.w" in params)
    layout = layout.only(params)
    if left := layout.without_rule(params):
        problem = f"The recipe {family} has parameters that paxml's language models do not: {listing(left)}."
        raise DataError(problem, "Give the recipe that it was trained with: `--recipe NAME`.")
    hint = "Give the recipe of the same sizes: `--recipe NAME --set PATH=VALUE`; `--dry-run` lists all names."
    return import_checkpoint(checkpoint, layout, config, recipe, shapes, run_dir, family, hint, dry_run)


def paxml_layout(arrays: Mapping[str, ArrayType], layers: Layers, has_head: bool = False) -> Layout:
    """The rules for a model, those for parts that it may lack included.

    Args:
      arrays: paxml's parameters. Repeated layers have a leading dimension of layers; pipelined ones of stages, or of
        repeats and stages; unrolled ones a number in their name.
      layers: Pax's.
      has_head: Whether pax's model has a table for the logits besides that of the embedding.
    """
    in_layers = [match for name in arrays if (match := _IN_LAYER.fullmatch(name))]
    prefix = next((match[1] or "" for match in in_layers), "")
    dims = next((tuple(arrays[match[0]].shape[:-1]) for match in in_layers if match[3] == "layer_norm.scale"), ())
    foreign = Layers.of_stacks(f"{prefix}x_layers_{{}}", len({match[2] for match in in_layers}), dims)
    is_combined = any(match[3].startswith("self_attention.combined_qkv") for match in in_layers)
    return Layout((*_top_rules(has_head), *_layer_rules(is_combined)), foreign, layers)


def _top_rules(has_head: bool) -> tuple[Rule, ...]:
    head = ("head.w", ()) if has_head else ("embedding.table", (transpose(1, 0),))  # [D, V] -> [V, D]
    return (
        Rule("softmax.logits_ffn.linear.w", *head),
        Rule("softmax.logits_ffn.bias.b", "head.bias" if has_head else "embedding.bias"),
        *((Rule("embedding_lookup.emb_var", "embedding.table"),) if has_head else ()),
        Rule("position_emb.emb_var", "position.table"),
        Rule("final_ln.scale", "final_norm.scale"),
        Rule("final_ln.bias", "final_norm.bias"),
    )


def _layer_rules(is_combined: bool) -> Iterator[Rule]:
    rule = functools.partial(layer_rule, "transformer")
    for part, ending in (("w", ""), ("b", "_bias")):
        names = tuple(f"attention.{x}{ending}" for x in _QKV)
        if is_combined:
            yield rule(f"self_attention.combined_qkv.{part}", names, unstack(0))
        else:
            yield from (rule(f"self_attention.{x}.{part}", name) for x, name in zip(_QKV, names, strict=True))
    yield rule("self_attention.post.w", "attention.post", transpose(1, 2, 0))  # [D, N, H] -> [N, H, D]
    yield rule("self_attention.post.b", "attention.post_bias")
    yield rule("self_attention.per_dim_scale.per_dim_scale", "attention.per_dim_scale")
    for foreign, pax in (("layer_norm", "attention_norm"), ("ff_layer.layer_norm", "feed_forward_norm")):
        yield from (rule(f"{foreign}.{part}", f"{pax}.{part}") for part in ("scale", "bias"))
    for foreign, pax in (("ffn_layer1", "in"), ("ffn_layer1_gate", "gate"), ("ffn_layer2", "out")):
        steps = (transpose(1, 0),) if pax == "out" else ()  # [F, D] -> [D, F]
        yield rule(f"ff_layer.{foreign}.linear.w", f"feed_forward.w_{pax}", *steps)
        yield rule(f"ff_layer.{foreign}.bias.b", f"feed_forward.b_{pax}")


def _zarr_arrays(state: epath.Path) -> dict[str, Any]:
    """The arrays of zarr folders, or of zarr folders inside an OCDBT database, opened but not read."""
    base = quote(f"{state}/" if "://" in os.fspath(state) else f"file://{state}/", safe=":/")
    base += "|ocdbt:" if (state / "manifest.ocdbt").exists() else ""
    keys = [key.decode() for key in tensorstore.KvStore.open(base).result().list().result()]
    names = [key.removesuffix("/.zarray") for key in keys if key.endswith("/.zarray")]
    opening = {name: tensorstore.open(f"{base}{quote(name)}/|zarr2:", read=True) for name in names}
    arrays = {name: array.result() for name, array in opening.items()}
    stored = {name: x.storage_statistics(query_fully_stored=True) for name, x in arrays.items()}
    lacking = [name for name, statistics in stored.items() if not statistics.result().fully_stored]
    if lacking:  # tensorstore may leave out zeros, but so does an incomplete copy
        log.warning("%s has no data for parts of %s: read as zeros.", state, listing(lacking))
    return arrays


def _msgpack_arrays(file: epath.Path) -> dict[str, Any]:
    """The arrays of a file of flax's msgpack format: a list of leaves, and the text of the tree that they come from."""
    content: Any = flax.serialization.msgpack_restore(file.read_bytes())
    leaves = content["flattened_state"]
    leaves = leaves if isinstance(leaves, list) else [leaves[str(i)] for i in range(len(leaves))]
    tree = ast.parse(content["str_pytree_state"].replace("*", "None"), mode="eval").body
    return dict(zip(_leaf_names(tree, ()), leaves, strict=True))


def _leaf_names(node: ast.AST, path: tuple[str, ...]) -> Iterator[str]:
    """The names of the leaves in the text of a JAX tree, such as `CustomNode(NestedMap[('m', 'v')], [None, …])`."""
    match node:
        case ast.Call(args=[inner]):  # PyTreeDef(…)
            yield from _leaf_names(inner, path)
        case ast.Call(args=[kind, ast.List(elts=values)]):
            found = ast.literal_eval(kind.slice) if isinstance(kind, ast.Subscript) else ()
            keys = found or ("step", "mdl_vars", "opt_states", "extra_state")  # of a TrainState
            for key, value in zip(keys, values, strict=True):
                yield from _leaf_names(value, (*path, key))
        case ast.Dict(keys=keys, values=values):
            for key, value in zip(keys, values, strict=True):
                yield from _leaf_names(value, (*path, ast.literal_eval(key)))  # pyrefly: ignore[bad-argument-type]
        case ast.List(elts=values) | ast.Tuple(elts=values):
            for i, value in enumerate(values):
                yield from _leaf_names(value, (*path, str(i)))
        case _:
            yield ".".join(path)
