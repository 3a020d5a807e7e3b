"""Parameters under paxml's names, and how closely pax computes what paxml computed.

    python -m paxcli.convert.paxml REFERENCE.npz

compares forward pass, gradients, six training steps and greedy decoding with the arrays in the file, and prints JSON. A
`.json` file of the same name beside it may hold the options of the run: `optimizer_args`, `lr_schedule_args`, `decode`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import re
import sys
from collections.abc import Mapping
from typing import Any, Literal

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np

from paxcli.errors import DataError
from paxcli.layers.positions import SinusoidPositions
from paxcli.mesh.weights import weights_of
from paxcli.models.decoding import Sampling, generate
from paxcli.models.language_model import LanguageModel
from paxcli.nested_map import NestedMap
from paxcli.optim.adam import Adam
from paxcli.optim.schedules import Constant, LinearRampupCosineDecay, LinearRampupExponentialDecay, Schedule
from paxcli.training.learner import Learner

Layout = Literal["repeat", "unrolled", "pipeline"]
Arrays = dict[str, np.ndarray]

# paxml's name within its layer -> ours, and the order of our dimensions among theirs.
_LAYER: dict[str, tuple[str, tuple[int, ...]]] = {
    "layer_norm/scale": ("attention_norm/scale", (0,)),
    "layer_norm/bias": ("attention_norm/bias", (0,)),
    "self_attention/post/w": ("attention/post", (1, 2, 0)),  # [D, N, H] -> [N, H, D]
    "self_attention/post/b": ("attention/post_bias", (0,)),
    "self_attention/per_dim_scale/per_dim_scale": ("attention/per_dim_scale", (0,)),
    "ff_layer/layer_norm/scale": ("feed_forward_norm/scale", (0,)),
    "ff_layer/layer_norm/bias": ("feed_forward_norm/bias", (0,)),
    "ff_layer/ffn_layer1/linear/w": ("feed_forward/w_in", (0, 1)),
    "ff_layer/ffn_layer1/bias/b": ("feed_forward/b_in", (0,)),
    "ff_layer/ffn_layer2/linear/w": ("feed_forward/w_out", (1, 0)),  # [F, D] -> [D, F]
    "ff_layer/ffn_layer2/bias/b": ("feed_forward/b_out", (0,)),
}
# Query, key and value are one array there, along its first dimension.
_COMBINED = {"self_attention/combined_qkv/w": "attention/{}", "self_attention/combined_qkv/b": "attention/{}_bias"}
_PARTS = ("query", "key", "value")
_ELSEWHERE: dict[str, tuple[str, tuple[int, ...]]] = {
    "softmax/logits_ffn/linear/w": ("embedding/table", (1, 0)),  # [D, V] -> [V, D]
    "softmax/logits_ffn/bias/b": ("embedding/bias", (0,)),
    "position_emb/emb_var": ("position/table", (0, 1)),
    "final_ln/scale": ("final_norm/scale", (0,)),
    "final_ln/bias": ("final_norm/bias", (0,)),
}
_STACK = re.compile(r"transformer/(?:repeat/sub/|pipeline/body/)?x_layers_(\d+)/(.+)")


def from_paxml(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Our parameters, layers stacked, out of `{paxml's name: array}`.

    Names may begin with `params/`. Repeated layers have a leading dimension of layers; pipelined ones of stages, or of
    repeats and stages; unrolled ones a number in their name.

    Raises:
      DataError: A name that pax has no parameter for.
    """
    tree: dict[str, Any] = {}
    layers: dict[str, dict[int, np.ndarray]] = {}
    for full_name, array in arrays.items():
        name = full_name.removeprefix("params/").removeprefix("lm/")
        stacked = _STACK.fullmatch(name)
        if stacked:
            for ours, values in _layer_arrays(stacked[2], array, full_name):
                layers.setdefault(ours, {})[int(stacked[1])] = values
        elif name in _ELSEWHERE:
            ours, order = _ELSEWHERE[name]
            _put(tree, ours, np.transpose(array, order))
        else:
            raise DataError(f"`{full_name}` is no parameter of a language model of Pax's.")
    for ours, by_index in layers.items():
        # All layers of a stage (or repeat) come before those of the next.
        in_order = np.stack([by_index[i] for i in sorted(by_index)], axis=1)
        _put(tree, f"stack/layers/{ours}", in_order.reshape(-1, *in_order.shape[2:]))
    return tree


def to_paxml(params: Mapping[str, Any], layout: Layout = "repeat", num_stages: int = 1, repeats: int = 1) -> Arrays:
    """The inverse of `from_paxml`, for stacked parameters.

    Args:
      params: Our parameters, layers stacked.
      layout: How paxml's run held its layers.
      num_stages: Of a pipeline.
      repeats: How often a circular pipeline goes round; with more than 1, arrays have a dimension for it.
    """
    flat = {
        "/".join(k.key for k in path): np.asarray(v) for path, v in jax.tree_util.tree_leaves_with_path(dict(params))
    }
    arrays = {
        f"lm/{theirs}": np.transpose(flat[ours], np.argsort(order))
        for theirs, (ours, order) in _ELSEWHERE.items()
        if ours in flat
    }
    for theirs, stacked in _their_layers(flat).items():
        for prefix, array in _arranged(stacked, layout, num_stages, repeats):
            arrays[f"lm/transformer/{prefix}/{theirs}"] = array
    return arrays


def _layer_arrays(inner: str, array: np.ndarray, full_name: str) -> list[tuple[str, np.ndarray]]:
    """Our names and arrays for one of paxml's, its leading dimensions made one."""
    if inner in _COMBINED:
        rank = 4 if inner.endswith("/w") else 3
        flat = array.reshape(-1, *array.shape[array.ndim - rank :])
        return [(_COMBINED[inner].format(part), flat[:, i]) for i, part in enumerate(_PARTS)]
    if inner not in _LAYER:
        raise DataError(f"`{full_name}` is no parameter of a layer of Pax's.")
    ours, order = _LAYER[inner]
    flat = array.reshape(-1, *array.shape[array.ndim - len(order) :])
    return [(ours, np.transpose(flat, (0, *(axis + 1 for axis in order))))]


def _their_layers(flat: Arrays) -> Arrays:
    """paxml's name within a layer -> array with a leading dimension of layers."""
    layers = {
        name.removeprefix("stack/layers/"): array for name, array in flat.items() if name.startswith("stack/layers/")
    }
    found = {
        theirs: np.transpose(layers[ours], (0, *(axis + 1 for axis in np.argsort(order))))
        for theirs, (ours, order) in _LAYER.items()
        if ours in layers
    }
    for theirs, pattern in _COMBINED.items():
        if pattern.format("query") in layers:
            found[theirs] = np.stack([layers[pattern.format(part)] for part in _PARTS], axis=1)
    return found


def _arranged(stacked: np.ndarray, layout: Layout, num_stages: int, repeats: int) -> list[tuple[str, np.ndarray]]:
    """The name before a layer's own names, and the array, in one of paxml's layouts."""
    if layout == "repeat":
        return [("repeat/sub/x_layers_0", stacked)]
    if layout == "unrolled":
        return [(f"x_layers_{i}", layer) for i, layer in enumerate(stacked)]
    lead = (repeats, num_stages) if repeats > 1 else (num_stages,)
    staged = stacked.reshape(*lead, -1, *stacked.shape[1:])
    in_stage = np.moveaxis(staged, len(lead), 0)
    return [(f"pipeline/body/x_layers_{i}", layer) for i, layer in enumerate(in_stage)]


def _put(tree: dict[str, Any], path: str, value: np.ndarray) -> None:
    *parents, last = path.split("/")
    for parent in parents:
        tree = tree.setdefault(parent, {})
    tree[last] = value


def model_of(params: Mapping[str, Any]) -> LanguageModel:
    """The model that paxml computed with such parameters: of family G, or with learned positions of family M."""
    layer, table = params["stack"]["layers"], params["embedding"]["table"]
    num_layers, model_dims, num_heads, dims_per_head = layer["attention"]["query"].shape
    config = LanguageModel.config(
        vocab_size=table.shape[0],
        max_seq_len=params["position"]["table"].shape[0] if "position" in params else 2**20,
        model_dims=model_dims,
        hidden_dims=layer["feed_forward"]["w_in"].shape[-1],
        num_layers=num_layers,
        num_heads=num_heads,
        dims_per_head=dims_per_head,
    )
    block = config.stack.block
    block.zero_padding = True
    block.attention.use_bias = "query_bias" in layer["attention"]
    block.attention.per_dim_scale = "per_dim_scale" in layer["attention"]
    if "position" in params:
        block.norm.epsilon = config.final_norm.epsilon = 1e-5
    else:
        config.position = SinusoidPositions.partial()
        config.embedding.scale_sqrt_depth = config.embedding.use_bias = True
        config.embedding.logit_cap, block.attention.logit_cap = 30.0, 50.0
    return fdl.build(config)


def learner_of(options: Mapping[str, Any], is_family_m: bool, run: str) -> Learner:
    """The learner of one of the two runs in a reference file, `recipe` or `const`."""
    args: dict[str, Any] = dict(options.get("optimizer_args", {}))
    given = {k: v for k, v in options.get("lr_schedule_args", {}).items() if k != "max"}
    if is_family_m:
        args = {"beta2": 0.95, "epsilon": 1e-8, "clip_threshold": -1, "weight_decay": 0.1, "learning_rate": 6e-5} | args
        args.setdefault("clip_gradient_norm_to_value", 1.0)
        schedule: Schedule = LinearRampupCosineDecay(265, 266, 108_600, 0.1)
    else:
        args = {"learning_rate": 1e-3, "clip_gradient_norm_to_value": 5.0} | args
        schedule = LinearRampupExponentialDecay(4000, 4001, 300_000, 0.1)
    schedule = dataclasses.replace(schedule, **given)
    known = ("beta1", "beta2", "epsilon", "epsilon_root", "clip_threshold", "weight_decay")
    fields: dict[str, Any] = {name: args[name] for name in known if name in args}
    if fields.get("clip_threshold", 1.0) <= 0:  # off, in paxml's words
        fields["clip_threshold"] = None
    return Learner(
        optimizer=Adam(**fields),
        learning_rate=args["learning_rate"] if run == "recipe" else 1e-2,
        schedule=schedule if run == "recipe" else Constant(),
        clip_gradient_norm_to_value=args["clip_gradient_norm_to_value"],
    )


def compare(arrays: Mapping[str, np.ndarray], options: Mapping[str, Any]) -> dict[str, Any]:
    """Largest differences between what pax computes and what a reference file holds.

    Absolute for logits and parameters, relative for losses, rates and norms; of a gradient, relative to its largest
    entry. The gradient of a key bias is 0 but for rounding, and is left out, with what Adam makes of it.
    """
    params = jax.tree.map(jnp.asarray, from_paxml(_group(arrays, "param")))
    model = model_of(params)
    batch = NestedMap(
        {name.removeprefix("in/"): jnp.asarray(v) for name, v in arrays.items() if name.startswith("in/")}
    )
    weights = weights_of(jax.eval_shape(model.init, jax.random.key(0), batch)["params"])

    @jax.jit
    def gradients(params):
        def loss(params):
            predictions: Any = model.apply({"params": params}, batch, method="compute_predictions")
            metrics, _ = model.apply({"params": params}, predictions, batch, method="compute_loss")
            return metrics["loss"][0], predictions.logits

        return jax.value_and_grad(loss, has_aux=True)(params)

    (loss, logits), grads = gradients(params)
    expected = from_paxml(_group(arrays, "grad"))
    result = {
        "logits": float(np.abs(logits - arrays["out/logits"]).max()),
        "loss": _relative(loss, arrays["out/total_loss"]),
        "gradients": {name: float(np.abs(a - b).max() / np.abs(b).max()) for name, a, b in _pairs(grads, expected)},
    }
    for run in ("recipe", "const"):
        learner = learner_of(options, "position" in params, run)
        result[run] = _compare_run(gradients, learner, params, weights, arrays, run)
    if "decode/output_ids" in arrays:
        index = "decode_index" if "decode_index/output_ids" in arrays else "decode"
        result["decode"] = _compare_decode(model, arrays, index, options)
    return result


def _compare_run(
    gradients: Any, learner: Learner, params: Any, weights: Any, arrays: Mapping[str, np.ndarray], run: str
) -> dict:
    update = jax.jit(functools.partial(learner.update, weights=weights))
    opt_state = learner.init(params, weights)
    seen: dict[str, list[float]] = {"loss": [], "learning_rate": [], "raw_grad_norm": []}
    before = params
    for step in range(6):
        before = params
        (loss, _), grads = gradients(params)
        params, opt_state, report = update(grads, opt_state, params, jnp.int32(step))
        for name, value in zip(seen, (loss, report["learning_rate"], report["grad_norm"]), strict=True):
            seen[name].append(float(value))
    expected = from_paxml(_group(arrays, f"{run}/param5"))
    differences = {name: np.abs(np.asarray(a) - np.asarray(b)) for name, a, b in _pairs(before, expected)}
    worst = max(differences, key=lambda name: differences[name].max())
    every = np.concatenate([difference.ravel() for difference in differences.values()])
    return {name: _relative(values, arrays[f"{run}/{name}"]) for name, values in seen.items()} | {
        "params_after_5": float(every.max()),
        "params_after_5_but_one": float(np.partition(every, -2)[-2]),
        "worst_parameter": worst,
    }


def _compare_decode(model: LanguageModel, arrays: Mapping[str, np.ndarray], group: str, options: Mapping) -> dict:
    params = jax.tree.map(jnp.asarray, from_paxml(_group(arrays, "const/param5")))
    prompts, outputs = arrays["decode/prompt_ids"], arrays[f"{group}/output_ids"][:, 0]
    lengths = (1 - arrays["decode/prompt_paddings"]).sum(axis=1).astype(np.int32)
    eos_id = options.get("decode", {}).get("eos_id", 1)
    run = jax.jit(functools.partial(generate, model), static_argnums=(4, 5, 6))
    same, worst = True, 0.0
    for prompt, length, output, expected in zip(
        prompts, lengths, outputs, arrays[f"{group}/logprobs"][:, 0], strict=True
    ):
        rest = output.size - int(length)
        found = run(params, prompt[None, :length], length[None], jax.random.key(0), rest, eos_id, Sampling())
        same &= bool((found.ids[0] == output).all())
        worst = max(worst, float(np.abs(found.log_probs[0, 1:] - expected[1:]).max()))
    return {"ids_equal": same, "log_probs": worst}


def _group(arrays: Mapping[str, np.ndarray], group: str) -> Arrays:
    return {name.removeprefix(f"{group}/"): v for name, v in arrays.items() if name.startswith(f"{group}/")}


def _pairs(ours: Any, theirs: Any) -> list[tuple[str, np.ndarray, np.ndarray]]:
    leaves = zip(jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(theirs), strict=True)
    named = [("/".join(key.key for key in path), np.asarray(a), np.asarray(b)) for (path, a), b in leaves]
    return [pair for pair in named if not pair[0].endswith("key_bias")]


def _relative(ours: Any, theirs: Any) -> float:
    """The largest relative difference; absolute where theirs is 0."""
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    return float((np.abs(ours - theirs) / np.where(theirs == 0, 1.0, np.abs(theirs))).max())


def main() -> None:
    """Compares with the file that the command line names."""
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m paxcli.convert.paxml REFERENCE.npz")
    path = pathlib.Path(sys.argv[1])
    options = json.loads(path.with_suffix(".json").read_text()) if path.with_suffix(".json").exists() else {}
    with np.load(path) as arrays:
        print(json.dumps(compare(dict(arrays), options), indent=2))


if __name__ == "__main__":
    main()
