"""The facts of every parameter of every recipe."""

from __future__ import annotations

import functools
import re

import fiddle as fdl
import jax
import pytest

from paxcli.config.index import find_recipes
from paxcli.config.load import load
from paxcli.config.render import config_text
from paxcli.mesh.sharding import path_of
from paxcli.mesh.weights import weights_of
from paxcli.training.experiment import num_devices, with_derived_sizes
from paxcli.training.state import abstract_params


@functools.cache
def _models() -> dict[str, tuple]:
    """One recipe for each kind of model, whatever its sizes, by name: its task and the shapes of a batch."""
    found = {}
    for entry in find_recipes().values():
        config = load(entry.name).config
        text = re.sub(r"\d+", "", config_text(config.task.model))
        if text not in found:
            experiment = fdl.build(with_derived_sizes(config, num_devices(config)))
            found[text] = (entry.name, (experiment.task, experiment.train_input.element_spec()))
    return dict(found.values())


@pytest.mark.slow
def test_declared_facts_agree_with_the_names_of_every_recipes_parameters():
    """Pax's layers name biases `b` or `…bias`, and scales `…scale`; stacked dimensions are in the path."""
    models = _models()
    assert len(models) > 15
    for name, (task, spec) in models.items():
        weights = weights_of(abstract_params(task, spec))
        facts = {path_of(path): fact for path, fact in jax.tree_util.tree_leaves_with_path(weights)}
        for path, fact in facts.items():
            last = path[-1]
            is_scale_or_bias = last.startswith("b_") or last == "b" or last.endswith(("bias", "scale"))
            assert fact.is_matrix != is_scale_or_bias, (name, path)
            assert fact.num_stacked == sum(part in ("layers", "stages", "repeats") for part in path), (name, path)
            assert not set(fact.contracts) & set(fact.produces)


def test_query_key_and_value_are_one_group():
    task, spec = _models()["tiny"]
    facts = weights_of(abstract_params(task, spec))
    attention = facts["stack"]["layers"]["attention"]
    assert {name for name, fact in attention.items() if fact.group == "qkv"} == {"query", "key", "value"}
    assert (attention["query"].contracts, attention["query"].produces) == ((0,), (1, 2))
    assert (attention["post"].contracts, attention["post"].produces) == ((0, 1), (2,))
    assert facts["embedding"]["table"].is_table
