"""Compares pax with a reference file of paxml: forward pass, gradients, six training steps, greedy decoding."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np

from paxcli.checkpoint.reading import named_leaves, nest_by_name
from paxcli.convert.layout import Layers, Layout, from_pax
from paxcli.convert.paxml import paxml_layout
from paxcli.layers.positions import SinusoidPositions
from paxcli.mesh.weights import weights_of
from paxcli.models.decoding import DecodeState, advance, prefill, score
from paxcli.models.language_model import LanguageModel
from paxcli.models.sampling import Sampling, sequence_settings
from paxcli.nested_map import NestedMap
from paxcli.optim.adam import Adam
from paxcli.optim.schedules import Constant, LinearRampupCosineDecay, LinearRampupExponentialDecay, Schedule
from paxcli.training.learner import Learner
from tests.convert.filling import to_pax


def from_paxml(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Pax's parameters as a tree, layers stacked, from `{paxml's name: array}`, such as `lm/final_ln/scale`."""
    foreign = _without_prefix(arrays)
    return nest_by_name(to_pax(_layout(foreign), foreign))


def to_paxml(params: Mapping[str, Any], like: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The inverse of `from_paxml`, with the layout of `like`."""
    pax = {name: np.asarray(leaf) for name, leaf in named_leaves(dict(params)).items()}
    layout = _layout(_without_prefix(like))
    return {f"lm/{name.replace('.', '/')}": array for name, array in from_pax(layout, pax)}


def _without_prefix(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name.removeprefix("lm/").replace("/", "."): array for name, array in arrays.items()}


def _layout(foreign: Mapping[str, np.ndarray]) -> Layout:
    count = len(paxml_layout(foreign, Layers(())).foreign.slots)
    return paxml_layout(foreign, Layers.of_stacks("layers", 1, (count,))).only(foreign, "foreign")


def model_of(params: Mapping[str, Any]) -> LanguageModel:
    """The model of these parameters: of Pax's family G, or, with learned positions, of family M."""
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
    if is_family_m:
        args = {"beta2": 0.95, "epsilon": 1e-8, "clip_threshold": -1, "weight_decay": 0.1, "learning_rate": 6e-5} | args
        args.setdefault("clip_gradient_norm_to_value", 1.0)
        schedule: Schedule = LinearRampupCosineDecay(265, 266, 108_600, 0.1)
    else:
        args = {"learning_rate": 1e-3, "clip_gradient_norm_to_value": 5.0} | args
        schedule = LinearRampupExponentialDecay(4000, 4001, 300_000, 0.1)
    schedule = dataclasses.replace(schedule, **options.get("lr_schedule_args", {}))
    known = ("beta1", "beta2", "epsilon", "epsilon_root", "clip_threshold", "weight_decay")
    fields: dict[str, Any] = {name: args[name] for name in known if name in args}
    if fields.get("clip_threshold", 1.0) <= 0:  # off, in paxml
        fields["clip_threshold"] = None
    return Learner(
        optimizer=Adam(**fields),
        learning_rate=args["learning_rate"] if run == "recipe" else 1e-2,
        schedule=schedule if run == "recipe" else Constant(),
        clip_gradient_norm_to_value=args["clip_gradient_norm_to_value"],
    )


def compare(arrays: Mapping[str, np.ndarray], options: Mapping[str, Any]) -> dict[str, Any]:
    """The largest differences between pax's results and a reference file.

    Absolute for logits and parameters, relative for losses, rates and norms; of a gradient, relative to its largest
    entry. The gradient of a key bias is 0 except for rounding, and is left out, as is its update.
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

    @functools.partial(jax.jit, static_argnames="rest")
    def run(ids: jax.Array, lengths: jax.Array, rest: int) -> DecodeState:
        settings = jax.tree.map(lambda x: jnp.full(1, x), sequence_settings(Sampling(), 0, 0))
        settings = settings._replace(repetition_penalty=None)
        prompt = prefill(model, params, ids, lengths, rest, settings, ids.shape[1] + rest)
        found = advance(model, params, prompt, rest, 0, Sampling(eos_ids=(eos_id,)))
        of_prompt, _ = score(model, params, ids, lengths)
        return found._replace(log_probs=found.log_probs.at[:, 1 : ids.shape[1]].set(of_prompt))

    same, worst = True, 0.0
    for prompt, length, output, expected in zip(
        prompts, lengths, outputs, arrays[f"{group}/logprobs"][:, 0], strict=True
    ):
        rest = output.size - int(length)
        found = run(prompt[None, :length], length[None], rest)
        same &= bool((found.ids[0] == output).all())
        worst = max(worst, float(np.abs(found.log_probs[0, 1:] - expected[1:]).max()))
    return {"ids_equal": same, "log_probs": worst}


def _group(arrays: Mapping[str, np.ndarray], group: str) -> dict[str, np.ndarray]:
    return {name.removeprefix(f"{group}/"): v for name, v in arrays.items() if name.startswith(f"{group}/")}


def _pairs(ours: Any, theirs: Any) -> list[tuple[str, np.ndarray, np.ndarray]]:
    leaves = zip(jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(theirs), strict=True)
    named = [("/".join(key.key for key in path), np.asarray(a), np.asarray(b)) for (path, a), b in leaves]
    return [pair for pair in named if not pair[0].endswith("key_bias")]


def _relative(ours: Any, theirs: Any) -> float:
    """The largest relative difference; absolute where theirs is 0."""
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    return float((np.abs(ours - theirs) / np.where(theirs == 0, 1.0, np.abs(theirs))).max())


if __name__ == "__main__":
    reference = pathlib.Path(sys.argv[1])
    with np.load(reference.with_suffix(".npz")) as saved:
        print(json.dumps(compare(dict(saved), json.loads(reference.with_suffix(".json").read_text()))))
