"""The model contract: everything that training, decoding, compiling, profiling and metrics ask of a model.

A model derives from `Model`. One that decodes derives from `CausalModel` (continues prompts) or from `Seq2SeqModel`
(source to target), and callers check that with `isinstance`. Methods other than the forward pass need only the model's
fields: they work on a model without parameters, outside `apply`, and cost nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from paxcli.errors import MeshError
from paxcli.layers.base import BALANCE_BIAS, Cache, Ids, Layer, SourceIds
from paxcli.layers.flops import Flops
from paxcli.layers.fp8 import FP8_STATE
from paxcli.layers.lora import REFERENCE, Lora, active_lora
from paxcli.layers.scopes import CAST, LOSS
from paxcli.layers.summaries import SUMMARIES, activations_by_layer
from paxcli.mesh.axes import Axis
from paxcli.mesh.sharding import path_of, set_during
from paxcli.models.losses import WeightedScalars
from paxcli.nested_map import NestedMap

Key = jax.Array  # a key of `jax.random`
Extended = tuple[Float[jax.Array, "B t V"], Cache]  # the logits of the ids that extend a row, and the new cache
PerRow = Int[jax.Array, " B"]  # an integer of each row: a length, a position

# Name of the PRNG keys that choose which tokens to mask: the same in all microbatches, unlike those of dropout.
MASKING = "masking"

_STEP_OVER_FORWARD = 3  # the backward pass computes two matmuls for each of the forward pass


class InputSizes(NamedTuple):
    """Sizes of a model that its inputs have to match; None = the model has no such size.

    An input with a field of the same name takes the value where the recipe leaves the field at None.

    Attributes:
      seq_len: Longest sequence, in training and in decoding (prompt and continuation).
      vocab_size: Token ids are below it, so the input's tokenizer has to fit.
      num_classes: Class labels are below it.
    """

    seq_len: int | None = None
    vocab_size: int | None = None
    num_classes: int | None = None


class Model(Layer):
    """A network with its loss (Pax: `praxis.base_model.BaseModel`).

    Attributes:
      fprop_dtype: Dtype of activations, and of the parameters in forward and backward passes (mixed precision); the
        stored parameters are float32.
      lora: Trained low-rank adapters of frozen weights; None = off.
    """

    fprop_dtype: Literal["float32", "bfloat16"] = "float32"
    lora: Lora | None = None

    @nn.nowrap
    def init(self, *args: Any, **kwargs: Any) -> Any:
        """Flax's `init`, with adapters and the reference."""
        with set_during(active_lora, self.lora):
            variables: Any = super().init(*args, **kwargs)
        return {**variables, "params": self.with_reference(variables["params"])}

    @nn.nowrap
    def apply(self, *args: Any, **kwargs: Any) -> Any:
        """Flax's `apply`, with adapters."""
        with set_during(active_lora, self.lora):
            return super().apply(*args, **kwargs)

    def compute_predictions(self, batch: NestedMap) -> NestedMap:
        """The forward pass: whatever `compute_loss` needs."""
        raise NotImplementedError

    def compute_loss(self, predictions: NestedMap, batch: NestedMap) -> tuple[WeightedScalars, NestedMap]:
        """The metrics of a batch, and arrays with one entry per example.

        Returns:
          Metric name → (mean, weight of the mean), `loss` among them; and arrays with leading dimension B, among them
          `scores` (log-probability of the example's targets) if inputs with metrics of their own can be evaluated, and
          `correct` and `weights` [B, T] if strict accuracy is to be known.
        """
        raise NotImplementedError

    @property
    def keeps_reference(self) -> bool:
        """Whether the loss compares with the parameters at the start of the run, a frozen copy in `reference`."""
        return False

    @nn.nowrap
    def with_reference(self, params: dict) -> dict:
        """Parameters at the start of a run, with their copy if the model keeps one."""
        if not self.keeps_reference:
            return params
        start = {name: x for name, x in params.items() if name != REFERENCE}
        return start | {REFERENCE: jax.tree.map(jnp.copy, start)}

    @property
    def input_sizes(self) -> InputSizes:
        """Sizes that inputs have to match."""
        return InputSizes()

    @nn.nowrap
    def validate(self, mesh: Mapping[str, int]) -> None:
        """Checks sizes that have to fit each other or the mesh, before any device is used.

        Args:
          mesh: Mesh axis → size.

        Raises:
          ConfigError: Some do not; with the arithmetic and the field to change.
        """

    @nn.nowrap
    def forward_flops(self, spec: NestedMap) -> Flops | None:
        """Matmul FLOPs of one forward pass over a batch of these shapes; None = unknown, and so is the MFU."""
        return None

    @nn.nowrap
    def step_flops(self, spec: NestedMap) -> Flops | None:
        """Matmul FLOPs of one training step, forward and backward; None = unknown.

        With adapters, frozen matrices have no gradient, and the adapters themselves do not count.
        """
        forward = self.forward_flops(spec)
        if forward is None or self.lora is None:
            return None if forward is None else forward * _STEP_OVER_FORWARD
        return Flops((_STEP_OVER_FORWARD - 1) * forward.weights, _STEP_OVER_FORWARD * forward.attention)

    @nn.nowrap
    def unchunked_logits(self, spec: NestedMap) -> tuple[int, ...] | None:
        """Shape [B, T, V] of the logits of a batch, if `loss_chunk` could reduce them; else None."""
        return None

    def loss_and_metrics(
        self, params: dict, batch: NestedMap, key: Key | None = None, fp8: Any = None, with_activations: bool = False
    ) -> tuple[WeightedScalars, NestedMap]:
        """What `compute_loss` returns, with the metrics that layers report added.

        A layer reports a metric with Flax's `sow("metrics", name, value)`. Its value is the mean over the layers that
        report it, its weight that of the loss.

        Args:
          params: The parameters, cast by `cast`.
          batch: The batch.
          key: PRNG key of training (dropout, masking); None in evaluation.
          fp8: State of FP8 matmuls in training; None in evaluation, and without FP8.
          with_activations: Whether to add, to the second, `activations`: the sums that `activations_by_layer` returns.
        """
        variables = {"params": params, FP8_STATE: fp8} if fp8 else {"params": params}
        rngs = None if key is None else {MASKING: key, "dropout": jax.random.fold_in(key, _sum_integers(batch))}
        mutable = ["metrics", SUMMARIES] if with_activations else ["metrics"]
        (metrics, examples), reported = self.apply(variables, batch, rngs=rngs, mutable=mutable)
        if with_activations:
            examples = NestedMap(examples, activations=activations_by_layer(reported.get(SUMMARIES, {})))
        found: dict[str, list[jax.Array]] = {}
        for path, values in jax.tree.leaves_with_path(reported.get("metrics", {})):
            found.setdefault(path_of(path)[-2], []).append(jnp.ravel(values))  # the last is the number of the call
        means = {name: jnp.mean(jnp.concatenate(values)) for name, values in found.items()}
        return metrics | {name: (mean, metrics["loss"][1]) for name, mean in means.items()}, examples

    def __call__(self, batch: NestedMap) -> tuple[WeightedScalars, NestedMap]:
        predictions = self.compute_predictions(batch)
        with jax.named_scope(LOSS):
            return self.compute_loss(predictions, batch)

    @jax.named_scope(CAST)
    def cast(self, params: dict) -> dict:
        """Parameters in `fprop_dtype`, for one forward and backward pass; balance biases stay in float32."""
        dtype = jnp.dtype(self.fprop_dtype)

        def cast(path: Any, p: jax.Array) -> jax.Array:
            is_cast = jnp.issubdtype(p.dtype, jnp.floating) and path_of(path)[-1] != BALANCE_BIAS
            return p.astype(dtype) if is_cast else p

        return jax.tree.map_with_path(cast, params)


def _sum_integers(batch: NestedMap) -> jax.Array:
    """A number that differs between the batches of a step, such as microbatches, so that each has its own dropout."""
    arrays = [x for x in jax.tree.leaves(batch) if jnp.issubdtype(x.dtype, jnp.integer)]
    return sum((jnp.sum(x.astype(jnp.uint32)) for x in arrays), start=jnp.uint32(0))


class DecodingModel(Model):
    """A model that decodes: it predicts tokens one after the other, with a cache. `input_sizes.seq_len` is set."""

    def extend(
        self, ids: Ids, segment_ids: Ids, segment_pos: Ids, cache: Cache, last: PerRow | None = None
    ) -> Extended:
        """Logits of the next token after each of `ids`: a prompt (prefill) or the last token.

        Args:
          ids: Tokens that follow those in the cache.
          segment_ids: 1 at tokens, `prompt_segment_id` at those of a prompt, 0 at padding after it, which a cache that
            is not indexed by position has to leave out.
          segment_pos: Positions of the tokens in their sequences.
          cache: Decode cache of the earlier tokens.
          last: Index of the last token of each row: only its logits are returned, [B, 1, V]. None = those of all.

        Returns:
          The logits, and the cache with these tokens added.
        """
        raise NotImplementedError

    @property
    def prompt_segment_id(self) -> int:
        """Segment id of prompts; negative if their tokens see each other in both directions (prefix-LM)."""
        return 1

    @property
    def max_decode_len(self) -> int:
        """Longest sequence in decoding, prompt included."""
        seq_len = self.input_sizes.seq_len
        assert seq_len is not None, f"{type(self).__name__}.input_sizes has no seq_len"
        return seq_len


def take_last(x: Float[jax.Array, "B T D"], last: PerRow | None) -> Float[jax.Array, "B t D"]:
    """Position `last` of each row, [B, 1, D]; None = all positions."""
    return x if last is None else jnp.take_along_axis(x, last[:, None, None], axis=1)


class CausalModel(DecodingModel):
    """A model that continues prompts (Hugging Face: CausalLM)."""

    @nn.nowrap
    def init_cache(self, batch_size: int, length: int) -> Cache:
        """An empty decode cache (KV cache) for `length` tokens, prompt included: any pytree of arrays.

        Raises:
          ConfigError: With these fields the model cannot decode.
        """
        raise NotImplementedError

    @nn.nowrap
    def cache_bytes(self, batch_size: int, length: int) -> int:
        """Size of that cache, unsharded."""
        cache = jax.eval_shape(lambda: self.init_cache(batch_size, length))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))


class Seq2SeqModel(DecodingModel):
    """A model that reads a source and writes a target (Hugging Face: Seq2SeqLM)."""

    def encode_source(self, ids: SourceIds, segment_ids: SourceIds, length: int) -> Cache:
        """A decode cache for up to `length` target tokens, with the encoded sources, of one segment each."""
        raise NotImplementedError


def check_mesh_divides(mesh: Mapping[str, int], axis: Axis, **fields: int | None) -> None:
    """Checks that a mesh axis divides fields of a model.

    Raises:
      MeshError: It does not divide one.
    """
    ways = mesh[axis]
    for field, size in fields.items():
        if size and size % ways:
            share = f"{size} / {ways} = {size / ways:g}"
            hint = f"Change `{field}` or the size of `{axis}` in `mesh.ici_mesh_shape`."
            raise MeshError(f"task.model.{field}={size} does not divide over mesh axis {axis}={ways} ({share}).", hint)
