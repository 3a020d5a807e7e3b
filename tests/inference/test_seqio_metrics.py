"""A SeqIO task's own metrics in evaluations and decoding, against `seqio.Evaluator` on the same model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxcli.inference.decode import PromptDecoder
from paxcli.inference.trained import TrainedRun
from paxcli.inputs.base_input import tokenizer_of
from paxcli.inputs.seqio_features import LanguageModelFeatures, SequenceModelFeatures
from paxcli.inputs.seqio_input import SeqIOInput
from paxcli.models.language_model import LanguageModel
from paxcli.models.sampling import Sampling
from paxcli.models.sequence_model import SequenceModel
from paxcli.nested_map import NestedMap
from paxcli.training.evaluate import evaluate
from paxcli.training.experiment import Experiment
from paxcli.training.run_dir import RunDir
from paxcli.training.session import build_session
from paxcli.training.step import make_eval_step
from paxcli.training.task import SingleTask
from tests.devices import cpu_devices
from tests.inputs.seqio_tasks import NUM_EXAMPLES, register
from tests.jobs import free_port, job_variables

LENGTHS = {"inputs": 6, "targets": 12}
SIZES = {"vocab_size": 300, "model_dims": 16, "hidden_dims": 32, "num_layers": 1, "num_heads": 2}
LANGUAGE = LanguageModelFeatures.config(weights_on_targets_only=True)


@pytest.fixture(scope="module")
def seqio():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return register()


def experiment(model: type, converter: fdl.Config, mixture="pax_toy", lengths=LENGTHS) -> fdl.Config[Experiment]:
    task = SingleTask.config(model=model.config(max_seq_len=40, **SIZES))
    task.train.global_batch_size, task.train.num_train_steps = 8, 1
    fields = {"mixture_name": mixture, "task_feature_lengths": lengths, "feature_converter": converter}
    epoch = {"split_name": "validation", "reset_for_eval": True, "eval_loop_num_batches": None}
    config = Experiment.config(task=task, train_input=SeqIOInput.config(split_name="train", **fields))
    config.eval_inputs = [SeqIOInput.config(name="toy", **fields, **epoch)]
    config.decode_inputs = [SeqIOInput.config(name="toy", **fields, **epoch)]
    return config


def evaluated_by_seqio(seqio, converter, task="pax_toy", lengths=LENGTHS, **model_fns) -> dict[str, float]:
    """The task's metrics by `seqio.Evaluator`, whose `model_fns` see its own enumerated dataset."""
    evaluator = seqio.Evaluator(
        task, converter, eval_split="validation", sequence_length=lengths, async_compute_metrics=False
    )
    nothing = {
        "predict_fn": lambda ds: [(i, [1]) for i, _ in ds],
        "score_fn": lambda ds: [(int(i), 0.0) for i, _ in ds],
    }
    metrics, _ = evaluator.evaluate(compute_metrics=True, **nothing | model_fns)
    return {f"seqio/{name}": float(getattr(value, "value", value)) for name, value in metrics.result()[task].items()}


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


def score_fn_of(model, params):
    """A `score_fn` for `seqio.Evaluator`: the log-probability of the targets, from one pass of the model."""

    def score_fn(ds):
        numbers, rows = zip(*ds.as_numpy_iterator(), strict=True)
        labels, weights, ids = (
            np.stack([row[f"decoder_{name}"] for row in rows])
            for name in ("target_tokens", "loss_weights", "input_tokens")
        )
        segment_ids = np.int32(labels != 0)
        batch = NestedMap(ids=ids, segment_ids=segment_ids, segment_pos=np.arange(ids.shape[1]) * segment_ids)
        batch = jax.tree.map(jnp.asarray, batch)
        logits = model.apply({"params": params}, batch, method="compute_predictions").logits
        log_probs = np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), labels[..., None], axis=-1)[..., 0]
        scores = list(zip(map(int, numbers), map(float, (log_probs * weights).sum(axis=1)), strict=True))
        return scores[::-1]

    return score_fn


def test_scores(seqio):
    config = experiment(LanguageModel, LANGUAGE)
    with build_session(config).active() as session:
        task, source = session.experiment.task, session.experiment.eval_inputs[0]
        params = session.new_state().params
        step = make_eval_step(task)

        def metrics_of(data) -> dict[str, float]:
            return evaluate(step, params, [data], session.mesh, task.metrics)["toy"]

        values = metrics_of(source)
        by_hosts = [metrics_of(Hosts(config.eval_inputs[0], hosts)) for hosts in (1, 2, 3)]

        score_fn = score_fn_of(task.model, params)
        expected = evaluated_by_seqio(seqio, seqio.PrefixLMFeatureConverter(pack=False), score_fn=score_fn)
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
    with build_session(experiment(model, converter)).active() as session:
        params = session.new_state().params
        source = session.experiment.decode_inputs[0]
        decoder = PromptDecoder(session.experiment.task.model, params, tokenizer_of(source), Sampling(max_tokens=8), 0)
        outputs, metrics = decoder.decode_data(source)
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

    expected = evaluated_by_seqio(seqio, own, predict_fn=predict_fn)
    assert metrics.keys() == {"seqio/overlap", "seqio/weighted"}
    assert metrics["seqio/overlap"] == expected["seqio/overlap"]
    assert metrics["seqio/weighted"] == expected["seqio/weighted"]


def test_a_decode_run_has_both_kinds_of_metrics(seqio, tmp_path, monkeypatch):
    """Text in, text out: prompts of unequal length, as many tokens as fit, the task's postprocessor, files written."""
    lengths = {"inputs": 12, "targets": 20}
    with build_session(experiment(LanguageModel, LANGUAGE, "pax_sums", lengths)).active() as session:
        model = session.experiment.task.model
        params = session.new_state().params
    params = jax.tree.map(lambda p: 3 * p, params)
    run = TrainedRun(session, RunDir(tmp_path))
    monkeypatch.setattr(run, "params", lambda step: params)
    outputs, metrics = run.answer_inputs(7, {}, seed=0)

    assert [output["example_id"] for output in outputs] == list(range(10))
    assert outputs[1]["prompt"] == "7 + 1 =" and outputs[1]["input"] == "toy"
    tokens_in = [len(output["prompt"]) + 2 for output in outputs]  # with the end token, after the shift
    assert len(set(tokens_in)) > 1
    for output, count in zip(outputs, tokens_in, strict=True):
        full = len(output["ids"]) == model.max_seq_len - count
        assert full if output["finish_reason"] == "length" else output["ids"][-1] == 1

    padded = [(output["ids"] + [1] * model.max_seq_len)[: model.max_seq_len] for output in outputs]
    answers = [(output["example_id"], ids) for output, ids in zip(outputs, padded, strict=True)]
    expected = evaluated_by_seqio(
        seqio,
        seqio.PrefixLMFeatureConverter(pack=False),
        "pax_sums",
        lengths,
        predict_fn=lambda ds: answers[::-1],
        score_fn=score_fn_of(model, params),
    )
    assert expected.keys() == {"seqio/likeness", "seqio/mean_score", "seqio/by_place"} <= metrics["toy"].keys()
    for name, value in expected.items():
        np.testing.assert_allclose(metrics["toy"][name], value, rtol=1e-4, err_msg=name)
    assert metrics["toy"]["seqio/likeness"] > 0

    lines = [json.loads(line) for line in (tmp_path / "decoded" / "7.jsonl").read_text().splitlines()]
    assert lines == outputs
    (logged,) = map(json.loads, (tmp_path / "decoded" / "metrics.jsonl").read_text().splitlines())
    assert logged["step"] == 7 and logged["seqio/likeness"] == metrics["toy"]["seqio/likeness"]


@pytest.mark.slow
def test_two_processes_score_each_example_once(tmp_path):
    """Every process decodes all examples, and evaluates its share."""
    command, port = [sys.executable, "-m", "tests.inference.scores_of_a_job", str(tmp_path)], free_port()
    jobs = [cpu_devices(8), *(cpu_devices(4) | job_variables(port, index) for index in range(2))]
    started = [
        subprocess.Popen(command, env=os.environ | job, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for job in jobs
    ]
    texts = [process.communicate(timeout=600) for process in started]
    assert [process.returncode for process in started] == [0, 0, 0], texts
    one, *two = (json.loads(stdout.splitlines()[-1]) for stdout, _ in texts)
    assert one["rows"] == [8, 8] and one["metrics"]["num_examples"] == 10
    for each in two:
        assert (each["rows"], each["outputs"]) == (one["rows"], one["outputs"])
        assert each["metrics"] == pytest.approx(one["metrics"], rel=1e-5)
