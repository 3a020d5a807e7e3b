from __future__ import annotations

import fiddle as fdl
import numpy as np
import pytest

from paxcli.errors import ConfigError, DataError
from paxcli.inputs.mixture import MixtureInput
from paxcli.inputs.synthetic import SyntheticInput
from paxcli.inputs.text import TextInput


@pytest.fixture
def letters(tmp_path):
    """Two files, of a thousand `a` and of a hundred `b`."""
    (tmp_path / "a").write_text("a" * 1000)
    (tmp_path / "b").write_text("b" * 100)
    return [str(tmp_path / "a"), str(tmp_path / "b")]


def mixture(files, weights, **fields) -> MixtureInput:
    inputs = [TextInput(files=[file]) for file in files]
    return MixtureInput(**{"inputs": inputs, "weights": weights, "seq_len": 10, "batch_size": 10, **fields})


def share_of_b(data: MixtureInput, batches: int) -> float:
    return float(np.mean([(data.get_next().ids == ord("b") + 3).any(axis=1) for _ in range(batches)]))


@pytest.mark.parametrize("weights", [[3, 1], [0.75, 0.25], [0.5, 0.5], [1, 9]])
def test_every_interval_has_the_proportions(letters, weights):
    data = mixture(letters, weights, is_training=True)
    expected = weights[1] / sum(weights)
    for _ in range(5):
        assert abs(share_of_b(data, 10) - expected) <= 0.02


def test_proportions_are_hundredths_of_the_smallest_weight():
    inputs = [SyntheticInput(), SyntheticInput()]  # shuffling the few rows of `letters` takes milliseconds a row
    data = MixtureInput(inputs=inputs, weights=[0.3, 0.7], seq_len=10, vocab_size=9, batch_size=10, is_training=True)
    of_b = np.count_nonzero(data.order(np.arange(100_000)) % 2)
    assert abs(of_b - 100_000 * 2.33 / 3.33) <= 1


def test_an_epoch_is_every_row_once(letters):
    data = mixture(letters, [1, 1], reset_for_eval=True, eval_loop_num_batches=None)
    ids = np.concatenate([batch.ids[batch.weights > 0] for batch in data.eval_batches()])
    assert (ids == ord("a") + 3).sum() == 1000 and (ids == ord("b") + 3).sum() == 100


def test_the_share_of_its_data_is_unknown_if_it_repeats(letters):
    """As many rows as both inputs have are half of one, and the other several times. It was reported as all data."""
    epoch = mixture(letters, [1, 1], reset_for_eval=True, eval_loop_num_batches=None)
    assert epoch.num_rows() == 112 and epoch.data_share(12) == 1  # each file has an end token, too
    data = mixture(letters, [1, 1], eval_loop_num_batches=12)
    assert len({*data.order(np.arange(112)).tolist()}) < 112 and data.data_share(12) is None


def test_its_data_is_that_of_its_inputs(letters):
    described = mixture(letters, [1, 1]).describe_data()
    assert described == " + ".join(f"TextInput: 1 files, {file} first" for file in letters)
    with pytest.raises(DataError, match="There is no file"):  # as in `pax train --dry-run`
        mixture([letters[0], f"{letters[1]}.missing"], [1, 1]).describe_data()


def test_other_weights_give_another_stream(letters):
    assert mixture(letters, [1, 1]).data_fingerprint() != mixture(letters, [1, 2]).data_fingerprint()


def test_infinite_inputs(letters):
    inputs = [TextInput(files=letters), SyntheticInput()]
    data = MixtureInput(inputs=inputs, weights=[1, 1], seq_len=10, vocab_size=259, batch_size=10, is_training=True)
    assert data.num_rows() is None
    assert data.get_next().ids.shape == (10, 10)


def test_builds_from_a_config_with_what_the_trainer_sets(letters):
    inputs = [TextInput.config(files=[file]) for file in letters]
    config = MixtureInput.config(inputs=inputs, weights=[1, 1], batch_size=4, seq_len=8, is_training=True)
    data = fdl.build(config)
    assert data.inputs[0].is_training and data.inputs[1].batch_size == 4
    assert [each.name for each in data.inputs] == ["train.0", "train.1"]
    assert data.inputs[0].seed != data.inputs[1].seed
    assert data.ids_to_strings(data.get_next().ids[:1], [8])


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (None, "2 inputs and 0 weights"),
        ([1], "2 inputs and 1 weights"),
        ([1, 0], "weights.1 must be above 0, not 0"),
        ([1, -1], "not -1"),
        ([1, float("nan")], "not nan"),
    ],
)
def test_wrong_weights_are_named(letters, weights, message):
    with pytest.raises(ConfigError, match=message):
        mixture(letters, weights).validate()


def test_inputs_without_random_access_are_named(letters):
    with pytest.raises(ConfigError, match="has no inputs"):
        mixture([], []).validate()
    data = mixture(letters, [1, 1])
    data.inputs[1].seq_len = 5
    with pytest.raises(ConfigError, match="differ"):
        data.validate()


def test_a_mixture_of_mixtures_is_refused(letters):
    inner = mixture(letters, [1, 1])
    with pytest.raises(ConfigError, match="a mixture is an input of another"):
        MixtureInput(inputs=[inner, inner], weights=[1, 1], batch_size=2, seq_len=4).validate()
