from __future__ import annotations

import json
import re

import jax
import numpy as np
import pytest

from paxcli.errors import ConfigError
from paxcli.inputs.c4 import C4Input
from paxcli.inputs.mixture import MixtureInput
from paxcli.inputs.multi_input import MultiInput
from paxcli.inputs.synthetic import SyntheticInput
from paxcli.inputs.text import TextInput

EPOCH = {"reset_for_eval": True, "eval_loop_num_batches": None}


def synthetic(batch_size=12, **fields) -> SyntheticInput:
    return SyntheticInput(batch_size=batch_size, seq_len=4, vocab_size=9, **fields)


@pytest.fixture
def make(tmp_path):
    (tmp_path / "a.txt").write_text("some text " * 9)

    def build(scale=1, **fields) -> MultiInput:
        text = TextInput(files=[f"{tmp_path}/a.txt"], batch_size=8 // scale, seq_len=4)
        return MultiInput(inputs={"text": text, "walk": synthetic(12 // scale)}, is_training=True, **fields)

    return build


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_batches_equal_those_of_the_inputs(make):
    data = make()
    batch = data.get_next()
    assert (batch.text.ids.shape, batch.walk.ids.shape) == ((4, 2, 4), (4, 3, 4))
    assert_same(batch.walk.ids.reshape(12, 4), synthetic(is_training=True).get_next().ids)
    spec = make().element_spec()
    assert jax.tree.map(lambda array: (array.shape, array.dtype), batch) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), spec
    )
    assert data.ids_to_strings(np.array([[ord("h") + 3]]), [1], "text.ids") == ["h"]
    assert data.ids_to_strings(np.array([[7]]), [1], "walk.ids") == ["7"]
    assert re.fullmatch(r"TextInput: 1 files, .*a\.txt first \+ SyntheticInput", data.describe_data())


def test_hosts_share_and_resume(make):
    whole = make()
    parts = [make(2, num_infeed_hosts=2, infeed_host_index=host) for host in range(2)]
    for _ in range(3):
        expected = whole.get_next()
        assert_same(parts[0].peek(), parts[0].peek())
        assert_same(expected, jax.tree.map(lambda *a: np.concatenate(a), *[part.get_next() for part in parts]))
    again = make()
    again.set_state(json.loads(json.dumps(whole.get_state())))
    assert_same(again.get_next(), whole.get_next())


def test_one_input_has_epochs_and_several_do_not(make):
    data = MultiInput(inputs={"walk": synthetic(num_examples=30)}, **EPOCH)
    assert len([*data.eval_batches()]) == len([*data.eval_batches()]) == 3
    for wrong in ({"inputs": {}}, {"inputs": {"a": synthetic(), "b": synthetic()}, **EPOCH}, {"batch_size": 3}):
        with pytest.raises(ConfigError):
            MultiInput(**wrong).validate()


@pytest.mark.parametrize("kind", [MixtureInput, MultiInput])
def test_settings_reach_inputs_of_inputs(kind, tmp_path):
    (tmp_path / "a.txt").write_text("".join(map(chr, range(33, 120))) * 9)

    def read(seed, hosts=1, host=0):
        text = TextInput(files=[f"{tmp_path}/a.txt"], batch_size=12 // hosts, seq_len=4)
        nested = {MixtureInput: {"inputs": [text], "weights": [1], "batch_size": 12 // hosts, "seq_len": 4}}
        child = kind(**nested.get(kind, {"inputs": {"text": text}}))
        sharing = {"num_infeed_hosts": hosts, "infeed_host_index": host}
        data = MultiInput(inputs={"child": child}, is_training=True, input_random_seed=seed, **sharing)
        (ids,) = (ids for name, ids in data.get_next().flatten_items() if name.endswith(".ids"))
        return ids.reshape(-1, 4)

    alone = TextInput(files=[f"{tmp_path}/a.txt"], batch_size=12, seq_len=4, is_training=True, input_random_seed=3)
    np.testing.assert_array_equal(read(3), alone.get_next().ids)
    np.testing.assert_array_equal(np.concatenate([read(3, 2, host) for host in range(2)]), read(3))
    assert (read(4) != read(3)).any()


@pytest.mark.parametrize("given", [None, "validation"])
def test_c4_in_training_has_the_split_of_training(given):
    child = MultiInput(inputs={"c4": C4Input(split_name=given)}, is_training=True).inputs["c4"]
    assert (child.split_name, child.feature_converter.pack) == (given or "train", True)
