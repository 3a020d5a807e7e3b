"""The decoder-only language model."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from paxcli.config.configurable import template
from paxcli.config.fields import ExtraLayerCount, Fraction, NonNegativeFloat, SafeOnResume
from paxcli.errors import ConfigError
from paxcli.layers.base import Cache, HiddenStates, Ids, cache_of, flops_of, visibility_of
from paxcli.layers.block import as_matmul_input
from paxcli.layers.flops import Flops, sum_flops
from paxcli.layers.lora import REFERENCE
from paxcli.layers.output_head import OutputHead
from paxcli.layers.stack import Stack, find_stacks
from paxcli.layers.token_predictor import TokenPredictor
from paxcli.models.base import CausalModel, Extended, Key, PerRow, take_last
from paxcli.models.chunked_loss import LossChunk, chunk_size, chunked_token_metrics
from paxcli.models.dpo import REJECTED, Dpo, interleave_pairs
from paxcli.models.losses import WeightedScalars, token_metrics
from paxcli.models.transformer import TransformerModel
from paxcli.nested_map import NestedMap


class TransformerLm(TransformerModel):
    """Embedding, positions, a stack of blocks, a final norm, and logits.

    Pax: `praxis.layers.TransformerLm` in `praxis.layers.models.LanguageModel`.

    Attributes:
      head: Template of an untied output head, such as `OutputHead.partial()`; None = the embedding's table (tied).
      stack: Template of the layers.
      label_smoothing: Probability that the loss spreads over all other tokens; `log_pplx` is without it.
      z_loss_weight: Weight of the z-loss, which keeps logits near 0, such as 1e-4; `log_pplx` is without it.
      loss_chunk: Tokens per device whose logits exist at one time, for the loss; null = all, `auto` = as many as fit in
        1 GiB (on a GPU 4 GiB) where all would take more than 4 GiB; on a CPU, in 16 MiB where all would take more than
        32 MiB. With chunks, only the metric `loss` can be trained on: for `dpo`, `auto` is null.

    The other fields are those of `TransformerModel`.
    """

    head: functools.partial[OutputHead] | None = None
    stack: functools.partial = template(Stack)
    label_smoothing: Fraction = 0.0
    z_loss_weight: NonNegativeFloat = 0.0
    loss_chunk: SafeOnResume[LossChunk] = "auto"

    def setup(self) -> None:
        super().setup()
        self._head = self._embedding if self.head is None else self.head(name="head", **self._table_widths)
        self._stack = self._stack_template(name="stack")

    def validate(self, mesh: Mapping[str, int]) -> None:
        super().validate(mesh)
        for field in ("use_bias", "logit_cap", "scale_logits_sqrt_depth"):
            if self.head is not None and self.embedding.keywords.get(field):
                problem = f"task.model.embedding.{field} has no effect: `task.model.head` computes the logits."
                raise ConfigError(problem, "Set it to false or null; `head` has its own `use_bias` and `logit_cap`.")

    def compute_predictions(self, batch: NestedMap) -> NestedMap:
        """Logits [B, T, V] of packed sequences: `ids`, `segment_ids` and `segment_pos`, all [B, T].

        With `bidirectional_prefix` in its attention, tokens with an `inputs_indicator` [B, T] are the prefix.

        With a chunked loss, `features` [B, T, D] instead, from which the loss computes logits.
        """
        return self._predict(batch.ids, batch)

    def compute_loss(self, predictions: NestedMap, batch: NestedMap) -> tuple[WeightedScalars, NestedMap]:
        """Mean cross-entropy of `labels` by `weights`, both [B, T]; weights in the predictions take precedence."""
        weights = predictions.get("weights", batch.weights)
        regularization = (self.label_smoothing, self.z_loss_weight)
        if "logits" in predictions:
            return token_metrics(predictions.logits, batch.labels, weights, *regularization)
        x = predictions.features
        chunk = chunk_size(self.loss_chunk, x.shape[:2], self.vocab_size)
        assert chunk is not None
        return chunked_token_metrics(self._head.scorer(), x, batch.labels, weights, chunk, *regularization)

    def forward_flops(self, spec: NestedMap) -> Flops | None:
        shape = spec.labels.shape
        return sum_flops((flops_of(self._stack_template(parent=None), *shape), flops_of(self._unbound_head, *shape)))

    def stacks(self) -> Mapping[str, Stack]:
        return find_stacks(stack=self._stack_template(parent=None))

    def unchunked_logits(self, spec: NestedMap) -> tuple[int, ...] | None:
        return None if isinstance(self.loss_chunk, int) else (*spec.labels.shape, self.vocab_size)

    @property
    def _stack_template(self) -> functools.partial:
        return functools.partial(self.stack, num_layers=self.num_layers, **self._widths)

    @property
    def _unbound_head(self) -> nn.Module:
        return (self.embedding if self.head is None else self.head)(**self._table_widths, parent=None)

    def _predict(self, ids: Ids, batch: NestedMap) -> NestedMap:
        x, _ = self._hidden(ids, *self._segments(batch), None)
        return self._predict_from(x)

    def _segments(self, batch: NestedMap) -> tuple[Ids, Ids]:
        """Segment ids, negative in a prefix, and positions: those in the row, where its segments see each other."""
        ids, positions = batch.segment_ids, batch.segment_pos
        visibility = visibility_of(self._stack_template(parent=None))
        if visibility == "prefix" and "inputs_indicator" in batch:
            ids = jnp.where(batch.inputs_indicator > 0, -ids, ids)
        if visibility == "row":
            positions = jax.lax.broadcasted_iota(positions.dtype, ids.shape, 1)
        return ids, positions

    def _predict_from(self, x: HiddenStates) -> NestedMap:
        x = as_matmul_input(self._final_norm(x))
        if chunk_size(self.loss_chunk, x.shape[:2], self.vocab_size) is None:
            return NestedMap(logits=self._head.logits(x))
        return NestedMap(features=x)

    def _hidden(self, ids: Ids, segment_ids: Ids, segment_pos: Ids, cache: Cache) -> tuple[HiddenStates, Cache]:
        """The output of the layers."""
        return self._stack(self._embed(ids, segment_pos), cache, segment_ids, segment_pos)


class LanguageModel(TransformerLm, CausalModel):
    """A decoder-only transformer: predicts each token from those before it.

    Attributes:
      dpo: Trains on preference pairs (`PreferenceInput`) instead of tokens, and evaluates on either; None = off. The
        loss of pairs has neither `label_smoothing` nor `z_loss_weight`.
      mtp_num_layers: Tokens after the next that are predicted as well (multi-token prediction), by one more layer each,
        of the kind of the last. The mean loss of these tokens is the metric `mtp_loss`; to train on it, name it in
        `task.loss_aggregator`. Decoding does not use them.

    The other fields are those of `TransformerLm`.
    """

    dpo: Dpo | None = None
    mtp_num_layers: ExtraLayerCount = 0

    def setup(self) -> None:
        super().setup()
        self._predictors = [self._predictor_template(name=f"mtp_{i}") for i in range(self.mtp_num_layers)]

    @property
    def _predictor_template(self) -> functools.partial:
        layers = self._stack_template(parent=None)
        if not isinstance(layers, Stack) or not layers.blocks:
            raise ConfigError("`mtp_num_layers` needs layers in a Stack.", "Set `task.model.mtp_num_layers` to 0.")
        same = layers.named_fields("remat_policy", "save", "offload")
        stack = functools.partial(Stack, num_layers=1, block=layers.blocks[-1], **same, **self._widths)
        same = self.named_fields("model_dims", "params_init")
        return functools.partial(TokenPredictor, stack=stack, norm=self.final_norm, **same)

    def _predict(self, ids: Ids, batch: NestedMap) -> NestedMap:
        x, _ = self._hidden(ids, *self._segments(batch), None)
        further = {"mtp_loss": self._mtp_loss(x, batch)} if self.mtp_num_layers else {}
        return NestedMap(self._predict_from(x), further_metrics=further)

    def compute_loss(self, predictions: NestedMap, batch: NestedMap) -> tuple[WeightedScalars, NestedMap]:
        metrics, examples = super().compute_loss(predictions, batch)
        return metrics | predictions.get("further_metrics", {}), examples

    def _mtp_loss(self, x: HiddenStates, batch: NestedMap) -> tuple[jax.Array, jax.Array]:
        """The mean loss of further tokens, and the sum of their weights. Those of another segment have none."""
        losses, labels, weights = [], batch.labels, batch.weights
        is_same = jnp.pad(batch.segment_ids[:, 1:] == batch.segment_ids[:, :-1], ((0, 0), (0, 1)))
        for predictor in self._predictors:
            x = predictor(x, self._embedding.embed(labels), *self._segments(batch))
            labels, weights = (jnp.roll(of_next, -1, axis=1) for of_next in (labels, weights))
            weights = jnp.where(is_same, weights, 0)
            metrics, _ = self.compute_loss(self._predict_from(x), NestedMap(labels=labels, weights=weights))
            losses.append(metrics["loss"])
        values, counts = (jnp.stack(found) for found in zip(*losses, strict=True))
        return jnp.sum(values * counts) / jnp.maximum(jnp.sum(counts), 1e-6), jnp.sum(counts)

    @property
    def keeps_reference(self) -> bool:
        return self.dpo is not None and self.lora is None

    def loss_and_metrics(
        self, params: dict, batch: NestedMap, key: Key | None = None, fp8: Any = None, with_activations: bool = False
    ) -> tuple[WeightedScalars, NestedMap]:
        if self.dpo is None or (REJECTED not in batch and key is None):
            return super().loss_and_metrics(params, batch, key, fp8, with_activations)
        if REJECTED not in batch:
            raise ConfigError("`task.model.dpo` trains on preference pairs.", "Set `train_input` to a PreferenceInput.")
        rows, reference = interleave_pairs(batch), self.clone(dpo=None, lora=None)
        start = jax.lax.stop_gradient(params.get(REFERENCE, params))
        loss_chunk = None if self.loss_chunk == "auto" else self.loss_chunk  # in chunks, scores have no gradient
        trained = self.clone(dpo=None, loss_chunk=loss_chunk)
        _, examples = trained.loss_and_metrics(params, rows, key, fp8, with_activations)
        _, of_reference = reference.loss_and_metrics(start, rows)
        scores, expected = (found.scores.reshape(-1, 2) for found in (examples, of_reference))
        has_loss = jnp.any(batch.weights > 0, axis=1).astype(jnp.float32)
        more = {"activations": examples.activations} if with_activations else {}
        return self.dpo.metrics(scores, expected, has_loss), NestedMap(more, scores=scores[:, 0] - scores[:, 1])

    def unchunked_logits(self, spec: NestedMap) -> tuple[int, ...] | None:
        return None if self.dpo is not None else super().unchunked_logits(spec)

    def forward_flops(self, spec: NestedMap) -> Flops | None:
        predictors = [self._predictor_template(parent=None) for _ in range(self.mtp_num_layers)]
        parts = [*predictors, *[self._unbound_head] * self.mtp_num_layers]
        return sum_flops((super().forward_flops(spec), *(flops_of(part, *spec.labels.shape) for part in parts)))

    def step_flops(self, spec: NestedMap) -> Flops | None:
        step, forward = super().step_flops(spec), self.forward_flops(spec)
        return step if self.dpo is None or step is None or forward is None else (step + forward) * 2

    def extend(
        self, ids: Ids, segment_ids: Ids, segment_pos: Ids, cache: Cache, last: PerRow | None = None
    ) -> Extended:
        """As `DecodingModel.extend`; without a cache, of whole sequences."""
        x, cache = self._hidden(ids, segment_ids, segment_pos, cache)
        return self._head.logits(as_matmul_input(self._final_norm(take_last(x, last)))), cache

    @property
    def prompt_segment_id(self) -> int:
        return -1 if visibility_of(self._stack_template(parent=None)) == "prefix" else 1

    def init_cache(self, batch_size: int, length: int) -> Cache:
        return cache_of(self._stack_template(parent=None), batch_size, length, self.fprop_dtype)
