"""A SeqIO task's own metrics in evaluations and decoding, against `seqio.Evaluator` on the same model."""

from __future__ import annotations

import warnings

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxcli.inputs.seqio_features import LanguageModelFeatures, SequenceModelFeatures
from paxcli.inputs.seqio_input import SeqIOInput
from paxcli.models.decoding import Sampling
from paxcli.models.language_model import LanguageModel
from paxcli.models.sequence_model import SequenceModel
from paxcli.nested_map import NestedMap
from paxcli.training.decode import decode_data
from paxcli.training.evaluate import evaluate
from paxcli.training.experiment import Experiment
from paxcli.training.session import open_session
from paxcli.training.state import create_state
from paxcli.training.step import make_eval_step, make_score_step
from paxcli.training.task import SingleTask
from tests.inputs.seqio_tasks import NUM_EXAMPLES, register

LENGTHS = {"inputs": 6, "targets": 12}
SIZES = {"vocab_size": 300, "model_dims": 16, "hidden_dims": 32, "num_layers": 1, "num_heads": 2}
LANGUAGE = LanguageModelFeatures.config(weights_on_targets_only=True)


@pytest.fixture(scope="module")
def seqio():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return register()


def experiment(model: type, converter: fdl.Config) -> fdl.Config[Experiment]:
    task = SingleTask.config(model=model.config(max_seq_len=30, **SIZES))
    task.train.global_batch_size, task.train.num_train_steps = 8, 1
    fields = {"mixture_name": "pax_toy", "task_feature_lengths": LENGTHS, "feature_converter": converter}
    epoch = {"split_name": "validation", "reset_for_eval": True, "eval_loop_num_batches": None}
    config = Experiment.config(task=task, train_input=SeqIOInput.config(split_name="train", **fields))
    config.eval_inputs = [SeqIOInput.config(name="toy", **fields, **epoch)]
    config.decode_inputs = [SeqIOInput.config(name="toy", **fields, **epoch)]
    return config


def evaluated_by_seqio(seqio, converter, model_fn, kind: str) -> dict[str, float]:
    """The task's metrics by `seqio.Evaluator`, whose `model_fn` sees its own enumerated dataset."""
    evaluator = seqio.Evaluator(
        "pax_toy", converter, eval_split="validation", sequence_length=LENGTHS, async_compute_metrics=False
    )
    nothing = {
        "predict_fn": lambda ds: [(i, [1]) for i, _ in ds],
        "score_fn": lambda ds: [(int(i), 0.0) for i, _ in ds],
    }
    metrics, _ = evaluator.evaluate(compute_metrics=True, **nothing | {kind: model_fn})
    return {
        f"seqio/{name}": float(getattr(value, "value", value)) for name, value in metrics.result()["pax_toy"].items()
    }


class Hosts:
    """What several hosts feed to one program: their batches end to end."""

    name = "toy"

    def __init__(self, config: fdl.Config[SeqIOInput], hosts: int):
        shards = [{"num_infeed_hosts": hosts, "infeed_host_index": host, "batch_size": 8} for host in range(hosts)]
        self.hosts = [fdl.build(fdl.copy_with(config, **shard)) for shard in shards]

        last = self.hosts[-1]
        self.example_metrics, self.text_tokenizer, self.data_share = (
            last.example_metrics,
            last.text_tokenizer,
            last.data_share,
        )

    def eval_batches(self):
        for batches in zip(*(host.eval_batches() for host in self.hosts), strict=True):
            yield jax.tree.map(lambda *arrays: np.concatenate(arrays), *batches)


def test_scores(seqio):
    config = experiment(LanguageModel, LANGUAGE)
    with open_session(config) as session:
        task, source = session.experiment.task, session.experiment.eval_inputs[0]
        params = create_state(task, session.spec, session.abstract).params
        steps = {"eval_step": make_eval_step(task), "score_step": make_score_step(task)}

        def metrics_of(data) -> dict[str, float]:
            return evaluate(inputs=[data], params=params, mesh=session.mesh, metrics=task.metrics, **steps)["toy"]

        values = metrics_of(source)
        by_hosts = [metrics_of(Hosts(config.eval_inputs[0], hosts)) for hosts in (1, 2, 3)]

        def score_fn(ds):
            numbers, rows = zip(*ds.as_numpy_iterator(), strict=True)
            labels, weights, ids = (
                np.stack([row[f"decoder_{name}"] for row in rows])
                for name in ("target_tokens", "loss_weights", "input_tokens")
            )
            segment_ids = np.int32(labels != 0)
            batch = NestedMap(ids=ids, segment_ids=segment_ids, segment_pos=np.arange(ids.shape[1]) * segment_ids)
            batch = jax.tree.map(jnp.asarray, batch)
            logits = task.model.apply({"params": params}, batch, method="compute_predictions").logits
            log_probs = np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), labels[..., None], axis=-1)[..., 0]
            scores = list(zip(map(int, numbers), map(float, (log_probs * weights).sum(axis=1)), strict=True))
            return scores[::-1]

        expected = evaluated_by_seqio(seqio, seqio.PrefixLMFeatureConverter(pack=False), score_fn, "score_fn")
    for name in ("seqio/mean_score", "seqio/by_place"):
        np.testing.assert_allclose(values[name], expected[name], rtol=1e-4)
    for others in by_hosts:
        assert others.keys() == values.keys() >= {"loss", "log_pplx", "accuracy"}
        for name, value in others.items() - {("num_batches", others["num_batches"])}:
            np.testing.assert_allclose(value, values[name], rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("model", [pytest.param(LanguageModel, marks=pytest.mark.slow), SequenceModel])
def test_predictions(seqio, model):
    converter = LANGUAGE if model is LanguageModel else SequenceModelFeatures.config()
    own = (
        seqio.PrefixLMFeatureConverter(pack=False)
        if model is LanguageModel
        else seqio.EncDecFeatureConverter(pack=False)
    )
    with open_session(experiment(model, converter)) as session:
        params = create_state(session.experiment.task, session.spec, session.abstract).params
        source = session.experiment.decode_inputs[0]
        outputs, metrics = decode_data(session, params, source, 8, Sampling(), 0)
    assert sorted(output["example_id"] for output in outputs) == list(range(NUM_EXAMPLES))
    by_prompt = {output["prompt"]: output["ids"] for output in outputs}

    def predict_fn(ds):
        found = []
        for number, row in ds.as_numpy_iterator():
            if model is LanguageModel:
                inputs = row["decoder_input_tokens"][: row["decoder_causal_attention"].sum()]
            else:
                inputs = row["encoder_input_tokens"]
            found.append((int(number), by_prompt[" ".join(str(i) for i in inputs if i)]))
        return found[::-1]

    expected = evaluated_by_seqio(seqio, own, predict_fn, "predict_fn")
    assert metrics.keys() == {"seqio/overlap", "seqio/weighted"}
    assert metrics["seqio/overlap"] == expected["seqio/overlap"]
    assert metrics["seqio/weighted"] == expected["seqio/weighted"]
