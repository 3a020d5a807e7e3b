"""A run with LoRA trains its adapters and nothing else."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import jax
import numpy as np
import pytest

import paxcli as pax
from paxcli.config.resolve import parse_assignments, resolve
from paxcli.errors import ConfigError
from paxcli.mesh.sharding import name_of
from paxcli.training.progress import Reporter
from paxcli.training.session import build_session
from paxcli.training.step import make_train_step
from tests.training.runs import on_meshes

SMALL = ["num_layers=2", "model_dims=32", "hidden_dims=64", "max_seq_len=16"]


class Messages(Reporter):
    """Keeps the messages of a run."""

    text = ""

    def message(self, text: str) -> None:
        self.text += text


LORA = ["task.model.lora=Lora", "lora.targets=attention/|feed_forward/", "lora.rank=4"]


def test_frozen_weights_stay_and_the_optimizer_holds_only_the_adapters() -> None:
    config = resolve("tiny-synthetic", sets=[*SMALL, *LORA, "optimizer=AdamW", "learning_rate=0.1"]).config
    with build_session(config).active() as session:
        task = session.experiment.task
        step, state = make_train_step(task, session.abstract), session.new_state()
        before = {name_of(path): np.array(x) for path, x in jax.tree.leaves_with_path(state.params)}
        for _ in range(3):
            state, _ = step(state, session.experiment.train_input.get_next())
        after = {name_of(path): np.array(x) for path, x in jax.tree.leaves_with_path(state.params)}
    adapters = [name for name in before if "_lora_" in name]
    assert len(adapters) == 12
    assert all(np.array_equal(before[name], after[name]) == (name not in adapters) for name in before)
    # 2 layers × rank 4 × (inputs + outputs), for four attention projections of 32 × 32 and two matrices of 32 × 64.
    count = 2 * 4 * (4 * (32 + 32) + 2 * (32 + 64))
    assert sum(before[name].size for name in adapters) == count
    moments_and_step_count = 2 * 4 * count + 4
    assert sum(x.nbytes for x in jax.tree.leaves(state.opt_state)) == moments_and_step_count


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ("atention/query", r"matches no parameter. Did you mean .*attention/query"),
        ("_bias$", r"matches no parameter. Parameters: stack/layers/attention/key"),
        ("([", "is not a regular expression"),
    ],
)
def test_targets_that_adapt_nothing_are_refused_before_devices_start(targets: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        pax.load("tiny-synthetic", set={"task.model.lora": "Lora", "lora.targets": targets}).validate()
    assert caught.value.exit_code == 2
    assert re.search(message, f"{caught.value.message} {caught.value.hint}")


def test_dropout_where_it_would_have_no_effect_is_refused() -> None:
    lora = ["task.model.lora=Lora", "lora.dropout=0.1", "task.model.head=OutputHead", "lora.targets=head"]
    with pytest.raises(ConfigError, match="does not apply to head/w"):
        build_session(resolve("tiny-synthetic", sets=lora).config)


def test_a_model_without_adapters_does_not_start_from_one_that_has_some(tmp_path: pathlib.Path) -> None:
    def recipe(*sets: str) -> pax.Recipe:
        return pax.load("tiny-synthetic", set=parse_assignments([*SMALL, "num_train_steps=1", "eval_inputs=[]", *sets]))

    pax.train(recipe(*LORA), tmp_path / "a")
    with pytest.raises(ConfigError, match=r"has adapters that this model lacks, such as `.*_lora_a`"):
        pax.train(recipe(), tmp_path / "b", init_from=f"{tmp_path}/a")
    messages = Messages()
    pax.train(recipe(*LORA), tmp_path / "a", init_from="nowhere", progress=messages)
    assert "so nothing is taken from nowhere" in messages.text


@pytest.mark.slow
def test_eight_devices_compute_what_one_computes(tmp_path: pathlib.Path) -> None:
    sets = [*SMALL, *LORA, "lora.use_dora=true", "learning_rate=0.01", "schedule=Constant"]
    case = {"recipe": "tiny-synthetic", "sets": sets, "steps": 3}
    one = on_meshes(tmp_path, 1, [case])[0]
    meshes = [{**case, "sets": [*sets, f"ici_mesh_shape={shape}"]} for shape in ("[1,2,4]", "[2,4,1]")]
    for found in on_meshes(tmp_path, 8, meshes):
        np.testing.assert_allclose(found["losses"], one["losses"], rtol=1e-5)


def test_each_microbatch_has_its_own_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    masks: list[bytes] = []
    bernoulli = jax.random.bernoulli

    def spy(*args: Any) -> jax.Array:
        found = bernoulli(*args)
        jax.debug.callback(lambda mask: masks.append(np.asarray(mask).tobytes()), found)
        return found

    monkeypatch.setattr(jax.random, "bernoulli", spy)
    sets = [*SMALL, "task.model.lora=Lora", "lora.targets=attention/query", "lora.rank=4", "lora.dropout=0.5"]
    with build_session(resolve("tiny-synthetic", sets=[*sets, "num_microbatches=4"]).config).active() as session:
        step = make_train_step(session.experiment.task, session.abstract)
        step(session.new_state(), session.experiment.train_input.get_next())
        jax.effects_barrier()
    assert len(set(masks)) == 2 * 4  # of each layer and microbatch
