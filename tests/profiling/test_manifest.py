"""A profile is valid for the conditions that it was made under; others are named and rejected."""

from __future__ import annotations

import json

import fiddle as fdl
import pytest
from etils import epath

from paxcli.config.resolve import resolve
from paxcli.errors import DataError
from paxcli.profiling.manifest import conditions, require_fresh, write_manifest


def tiny(*sets: str) -> fdl.Config:
    return resolve("tiny", (), sets).config


@pytest.fixture
def made(tmp_path) -> epath.Path:
    directory = epath.Path(tmp_path)
    write_manifest(directory, conditions(tiny()), {"steps": 5})
    return directory


def test_the_manifest_has_the_conditions(made):
    found = json.loads((made / "manifest.json").read_text())
    assert {"config", "jax", "jaxlib", "xla", "device_kind", "num_devices", "xla_flags", "steps"} <= found.keys()


@pytest.mark.parametrize(
    "changed", ["num_layers=4", "train_input.input_random_seed=3", "save_interval_steps=7", "eval_inputs=[]"]
)
def test_fields_outside_the_program_may_change(made, changed):
    require_fresh(made, conditions(tiny(changed)))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ("num_layers=2", "task.model.num_layers: 4 → 2"),
        ("mesh.ici_mesh_shape={fsdp: 1}", "mesh.ici_mesh_shape"),
        ("num_microbatches=2", "num_microbatches: 1 → 2"),
    ],
)
def test_another_recipe_is_rejected(made, changed, named):
    with pytest.raises(DataError) as caught:
        require_fresh(made, conditions(tiny(changed)))
    assert named in caught.value.message and caught.value.exit_code == 5


@pytest.mark.parametrize("field", ["jax", "xla", "device_kind", "num_devices", "xla_flags"])
def test_another_machine_is_rejected(made, field):
    with pytest.raises(DataError, match=f"  {field}: .* → other"):
        require_fresh(made, conditions(tiny()) | {field: "other"})


def test_without_a_manifest_there_is_no_profile(tmp_path):
    with pytest.raises(DataError, match="no profile"):
        require_fresh(epath.Path(tmp_path / "nowhere"), conditions(tiny()))
    for content in ("{", "[]", "null", '{"config": 1}'):
        (tmp_path / "manifest.json").write_text(content)
        with pytest.raises(DataError, match="damaged"):
            require_fresh(epath.Path(tmp_path), conditions(tiny()))
