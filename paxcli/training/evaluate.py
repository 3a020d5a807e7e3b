"""Evaluation: metrics of a model on the evaluation inputs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from paxcli.errors import ConfigError, PaxError
from paxcli.inputs.base_input import BaseInput
from paxcli.inputs.tokenizers import Tokenizer, count_bytes
from paxcli.log import log
from paxcli.mesh.sharding import infeed_shard, put_batch
from paxcli.nested_map import NestedMap
from paxcli.training.summaries import count_examples
from paxcli.training.task import Metrics

_count_examples = jax.jit(count_examples)
_TARGETS, _BYTES = "targets", "bytes"


def evaluate(
    eval_step: Callable,
    params: dict,
    inputs: Iterable[BaseInput],
    mesh: Mesh,
    metrics: Metrics,
    check_stop: Callable[[], object] = lambda: None,
) -> dict[str, dict[str, float]]:
    """Metrics of one evaluation run on each input: input name → metric → value.

    Besides the model's metrics: `perplexity`; `bits_per_byte`, where the input has a tokenizer; what was read, as
    `num_examples`, `num_tokens` and `num_batches`; and `data_share`, the share of the input's data, where it is known.
    Metrics with a total weight of 0 are left out: their means are undefined.
    Inputs with metrics of their own also compute those, from the scores of their examples.
    `check_stop` is called before each batch; it raises an exception to end the evaluation.

    Raises:
      ConfigError: An input has metrics of its own, and its batches or the model have no scores of examples.
    """

    def evaluate_one(source: BaseInput) -> dict[str, float]:
        of_scores = source.example_metrics("scores")
        sums, scored = [], []
        tokenizer, counts = _tokenizer_of(source), Counter[str]()
        for batch in source.eval_batches():
            check_stop()
            counts.update(_count(batch, tokenizer))
            batch = put_batch(batch, mesh)
            found, examples = eval_step(params, batch)
            if of_scores is not None and not examples:
                hint = "Use a model with scores, such as LanguageModel, or remove the metric functions of the task."
                raise ConfigError(f"The model has no `scores`, which metrics of eval input `{source.name}` need.", hint)
            sums.append(found)
            scored.append(examples)
            # One batch computes while the next is read, so that a stop takes effect soon.
            sums[-2:-1] = jax.device_get(sums[-2:-1])
        if not sums:
            return {}
        total = metrics.combine(jax.device_get(sums))
        if not total["loss"][1]:
            log.warning("Eval input `%s`: all target weights are 0, so its loss is undefined.", source.name)
        values = {name: value / weight for name, (value, weight) in total.items() if weight}
        if of_scores is not None:
            values |= of_scores(_by_example(scored))
        counts = _over_processes(counts, mesh)
        if "log_pplx" in values:
            values |= _of_perplexity(values["log_pplx"], total["log_pplx"][1], counts)
        values |= {name: counts[name] for name in ("num_examples", "num_tokens") if name in counts}
        share = source.data_share(len(sums))
        return values | {"num_batches": len(sums)} | ({} if share is None else {"data_share": share})

    return {str(source.name): evaluate_one(source) for source in inputs}


def _tokenizer_of(source: BaseInput) -> Tokenizer | None:
    try:
        return source.text_tokenizer
    except PaxError:  # token files, whose tokenizer need not be here
        return None


def _count(batch: NestedMap, tokenizer: Tokenizer | None) -> Counter[str]:
    """Counts of this process's part of a batch: examples, tokens, and the targets and bytes of text of its labels."""
    counts: Counter[str] = Counter({name: int(count) for name, count in _count_examples(batch).items()})
    if tokenizer is not None and "labels" in batch:
        for ids, labels, weights in zip(batch.ids, batch.labels, batch.weights, strict=True):
            kept = weights > 0
            before = np.where(np.append(True, kept[:-1]), ids, -1)  # what follows a prompt is a text of its own
            counts.update({_TARGETS: int(kept.sum()), _BYTES: count_bytes(tokenizer, labels[kept], before[kept])})
    return counts


def _over_processes(counts: Counter[str], mesh: Mesh) -> dict[str, int]:
    """The sums of the counts of all input shards, in halves since JAX gathers 32-bit integers."""
    parts = multihost_utils.process_allgather({name: np.array(divmod(n, 2**31)) for name, n in counts.items()})
    copies = jax.process_count() // infeed_shard(mesh)[0]  # processes that read the same shard
    return {name: int(np.sum(x.reshape(-1, 2).astype(np.int64) @ (2**31, 1))) // copies for name, x in parts.items()}


def _of_perplexity(log_pplx: float, weight: float, counts: dict[str, int]) -> dict[str, float]:
    """The perplexity, and bits per byte unless targets are weighted otherwise than by 1, as masked tokens are."""
    values = {"perplexity": math.exp(min(log_pplx, 700))}
    # On the devices, the weights of a batch are added up in float32.
    if counts.get(_BYTES) and math.isclose(weight, counts[_TARGETS], rel_tol=1e-3, abs_tol=0.5):
        values["bits_per_byte"] = log_pplx * counts[_TARGETS] / counts[_BYTES] / math.log(2)
    return values


def _by_example(batches: list[dict[str, jax.Array]]) -> dict[int, float]:
    """`example_id` → score; rows with a negative id are padding."""
    found = jax.device_get(batches)
    numbers, scores = (np.concatenate([batch[name] for batch in found]) for name in ("example_id", "scores"))
    return {n: score for n, score in zip(numbers.tolist(), scores.tolist(), strict=True) if n >= 0}
