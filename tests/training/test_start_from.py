"""A new run starts from another run's parameters, in every part of its state."""

from __future__ import annotations

import json
import pathlib
import shutil

import jax
import numpy as np
import optax
import pytest
from etils import epath

import paxcli as pax
from pax_recipes.tiny import tiny_synthetic
from paxcli.checkpoint.manager import CheckpointStore
from paxcli.checkpoint.reading import named_leaves
from paxcli.errors import ConfigError
from paxcli.optim.from_optax import Optax
from paxcli.training.progress import Reporter
from paxcli.training.run_dir import RunDir
from paxcli.training.session import build_session, state_shapes
from paxcli.training.start_from import WarmStart, copy_origin, load_warm_start, write_run


@pytest.mark.parametrize("factory", [optax.contrib.schedule_free_sgd, optax.contrib.prodigy], ids=lambda f: f.__name__)
def test_the_optimizer_starts_from_the_loaded_parameters(tmp_path: pathlib.Path, factory) -> None:
    """These keep the first parameters in their state, and the moving average and EWC start from them too."""
    config = tiny_synthetic()
    model, learner = config.task.model, config.task.train.learner
    model.num_layers, model.model_dims, model.hidden_dims, model.max_seq_len = 1, 32, 32, 16
    learner.optimizer, learner.ema_decay, learner.ewc_regularizer_weight = Optax.config(factory=factory), 0.9, 0.1
    with build_session(config).active() as session:
        first = session.new_state()
        first = first.replace(params=jax.tree.map(lambda p: p + 1, first.params))
        with CheckpointStore(epath.Path(tmp_path) / "checkpoints") as store:
            store.save(0, first, {}, force=True)
        new = session.new_state()
        shardings = jax.tree.map(lambda x: x.sharding, new)
        found, report = load_warm_start(new, WarmStart(str(tmp_path)), session.experiment.task)
        weights = jax.tree.unflatten(jax.tree.structure(first.params), first.weights)
        expected = jax.jit(lambda params: session.experiment.task.train.learner.init(params, weights))(first.params)
    assert not report.arrays.missing
    jax.tree.map(np.testing.assert_array_equal, (found.params, found.opt_state), (first.params, expected))
    assert jax.tree.map(lambda x: x.sharding, found) == shardings


def test_the_files_beside_imported_weights_come_along(tmp_path: pathlib.Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    (old / "huggingface").mkdir(parents=True)
    new.mkdir()
    copy_origin(WarmStart(str(new)), epath.Path(old))  # an ordinary run has none
    (old / "huggingface" / "config.json").write_text("{}")
    (old / "huggingface" / "additional_chat_templates").mkdir()
    (old / "huggingface" / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    copy_origin(WarmStart(str(old)), epath.Path(new))
    assert (new / "huggingface" / "config.json").read_text() == "{}"
    assert (new / "huggingface" / "additional_chat_templates" / "tool_use.jinja").read_text() == "{{ tools }}"


def test_layers_in_another_form_are_refused(tmp_path: pathlib.Path) -> None:
    for scan in (False, True):
        config = tiny_synthetic()
        model = config.task.model
        model.num_layers, model.model_dims, model.hidden_dims, model.max_seq_len = 2, 32, 32, 16
        model.stack.scan = scan
        with build_session(config).active() as session:
            state = session.new_state()
            if not scan:
                with CheckpointStore(epath.Path(tmp_path) / "checkpoints") as store:
                    store.save(0, state, {}, force=True)
                continue
            with pytest.raises(ConfigError, match="would start at random values") as refused:
                load_warm_start(state, WarmStart(str(tmp_path)), session.experiment.task)
            assert "`scan`" in refused.value.hint


@pytest.mark.parametrize("overlay", ["lora", "dpo"])
def test_a_run_of_imported_weights_takes_adapters_and_a_reference(tmp_path: pathlib.Path, overlay: str) -> None:
    """As one that starts from it in another directory; until it has saved a checkpoint, it takes any recipe."""
    pairs = [{"prompt": f"{i}?", "chosen": f"{i}!", "rejected": "no"} for i in range(8)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    small = {"num_layers": 1, "model_dims": 32, "hidden_dims": 32, "max_seq_len": 32, "random_seed": 1}
    small |= {"num_train_steps": 2, "global_batch_size": 4, "eval_inputs": [], "learning_rate": 0.1}
    plain = pax.load("tiny", set=small)
    shapes, chance = state_shapes(plain.config), np.random.default_rng(0)
    arrays = {
        f"params.{name}": chance.normal(size=x.shape, scale=0.1) for name, x in named_leaves(shapes.params).items()
    }
    arrays = {name: x.astype(np.float32) for name, x in arrays.items()}
    write_run(plain.config, plain.yaml(), tmp_path / "imported", shapes, arrays)
    shutil.copytree(tmp_path / "imported", tmp_path / "source")
    files = {"train_input.files": [str(tmp_path / "pairs.jsonl")]} if overlay == "dpo" else {}
    tuned = pax.load("tiny", overlays=overlay, set=small | files)

    def train(name: str, recipe: pax.Recipe, **options: object) -> pax.Run:
        return pax.train(recipe, tmp_path / name, progress=Reporter(), **options)

    RunDir(tmp_path / "imported").describe(
        plain.config, plain.yaml()
    )  # as a start that was stopped before its first save
    found, expected = train("imported", tuned), train("other", tuned, init_from=tmp_path / "source")
    assert found.metrics()["loss"].tolist() == expected.metrics()["loss"].tolist()
    jax.tree.map(np.testing.assert_array_equal, found.params(), expected.params())
    longer = pax.load("tiny", overlays=overlay, set=small | files | {"num_train_steps": 4})
    assert train("imported", longer, allow_changed=True).metrics()["step"].tolist() == [1, 2, 4]
