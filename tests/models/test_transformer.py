"""The sizes of a transformer model have to fit each other and the mesh."""

from __future__ import annotations

import pytest

from paxcli.errors import ConfigError
from paxcli.mesh.axes import MESH_AXES
from paxcli.models.base import InputSizes
from paxcli.models.language_model import LanguageModel
from paxcli.models.sequence_model import SequenceModel

WIDTHS = dict(vocab_size=100, max_seq_len=32, model_dims=24, hidden_dims=64, num_layers=2, num_heads=4)


@pytest.mark.parametrize(
    ("changes", "mesh", "message"),
    [
        (dict(num_heads=5), {}, r"model_dims=24 does not divide into num_heads=5 heads"),
        (dict(num_kv_heads=3), {}, r"num_kv_heads=3 does not divide num_heads=4"),
        ({}, {"tensor": 8}, r"task.model.num_heads=4 does not divide over mesh axis tensor=8 \(4 / 8 = 0.5\)"),
        (dict(hidden_dims=66), {"tensor": 4}, r"hidden_dims=66 does not divide over mesh axis tensor=4"),
        ({}, {"fsdp": 16}, r"model_dims=24 does not divide over mesh axis fsdp=16"),
    ],
)
@pytest.mark.parametrize("model", [LanguageModel, SequenceModel])
def test_sizes_that_do_not_fit_are_refused(model, changes, mesh, message):
    sizes = dict.fromkeys(MESH_AXES, 1)
    model(**WIDTHS).validate(sizes | {"tensor": 4, "fsdp": 8})
    model(**WIDTHS | dict(num_heads=5, dims_per_head=8)).validate(sizes)
    with pytest.raises(ConfigError, match=message):
        model(**WIDTHS | changes).validate(sizes | mesh)


def test_inputs_match_its_lengths_and_vocabulary():
    assert LanguageModel(**WIDTHS).input_sizes == InputSizes(seq_len=32, vocab_size=100)
