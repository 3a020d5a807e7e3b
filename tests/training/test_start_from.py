"""A new run starts from another run's parameters, in every part of its state."""

from __future__ import annotations

import pathlib

import jax
import numpy as np
import optax
import pytest
from etils import epath

from pax_recipes.tiny import tiny_synthetic
from paxcli.checkpoint.manager import CheckpointStore
from paxcli.errors import ConfigError
from paxcli.optim.from_optax import Optax
from paxcli.training.session import open_session
from paxcli.training.start_from import WarmStart, copy_origin, load_warm_start


@pytest.mark.parametrize("factory", [optax.contrib.schedule_free_sgd, optax.contrib.prodigy], ids=lambda f: f.__name__)
def test_the_optimizer_starts_from_the_loaded_parameters(tmp_path: pathlib.Path, factory) -> None:
    """These keep the first parameters in their state, and the moving average and EWC start from them too."""
    config = tiny_synthetic()
    model, learner = config.task.model, config.task.train.learner
    model.num_layers, model.model_dims, model.hidden_dims, model.max_seq_len = 1, 32, 32, 16
    learner.optimizer, learner.ema_decay, learner.ewc_regularizer_weight = Optax.config(factory=factory), 0.9, 0.1
    with open_session(config) as session:
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
        with open_session(config) as session:
            state = session.new_state()
            if not scan:
                with CheckpointStore(epath.Path(tmp_path) / "checkpoints") as store:
                    store.save(0, state, {}, force=True)
                continue
            with pytest.raises(ConfigError, match="would start at random values") as refused:
                load_warm_start(state, WarmStart(str(tmp_path)), session.experiment.task)
            assert "`scan`" in refused.value.hint
