"""Weights of MaxText: the logits are HF's, the way back is the identity, and a run goes on."""

from __future__ import annotations

import datetime
import json
import pathlib
from typing import Any

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxcli.checkpoint.manager import CheckpointStore
from paxcli.checkpoint.maxtext_layout import MaxTextLayout
from paxcli.checkpoint.reading import nested
from paxcli.errors import ConfigError, DataError
from paxcli.inputs.nested_map import NestedMap
from paxcli.maxtext.back import to_maxtext
from paxcli.maxtext.building import build_config
from paxcli.maxtext.conversion import convert
from paxcli.maxtext.launch import Launch, Pair
from paxcli.training.maxtext_weights import Carried, export_maxtext, import_maxtext
from tests.models import hf_families
from tests.training import maxtext_checkpoints
from tests.training.maxtext_checkpoints import KEYS, SIZES

LOGITS = dict(atol=1e-4, rtol=0)


def config_of(family: str, **more: Any) -> fdl.Config:
    keys = SIZES | KEYS[family] | more
    launch = Launch(1, pairs=[Pair(key, str(value), 1) for key, value in keys.items()])
    config = build_config(convert(launch, family, date=datetime.date(2026, 1, 1)))
    if family == "llama31":
        config.task.model.stack.block.attention.rotary.scaling.original_max_seq_len = 48
    return config


def layout_of(config: fdl.Config, family: str, **more: Any) -> MaxTextLayout:
    return MaxTextLayout(KEYS[family]["decoder_block"], config.task.model.num_layers, **more)


def carried(
    tmp_path: pathlib.Path, family: str, checkpoint: pathlib.Path, name: str = "run", **more: Any
) -> tuple[Carried, dict[str, np.ndarray]]:
    """The checkpoint as a run; the arrays of that, by name."""
    config = config_of(family, **more)
    done = import_maxtext(config, "recipe: x\n", str(checkpoint), tmp_path / name, layout_of(config, family))
    return done, arrays_of(tmp_path / name)


def arrays_of(run_dir: pathlib.Path) -> dict[str, np.ndarray]:
    store = CheckpointStore(run_dir / "checkpoints")
    manifest = json.loads((store.directory / str(store.latest_step()) / "manifest" / "metadata").read_text())
    abstract = {
        name: jax.ShapeDtypeStruct(tuple(entry["shape"]), entry["dtype"])
        for name, entry in manifest["content"]["arrays"].items()
    }
    latest = store.latest_step()
    assert latest is not None
    names = list(abstract)
    values, _ = store.restore(latest, dict(zip(names, abstract.values(), strict=True)))
    return {name: np.asarray(values[name]) for name in names}


def params_in(arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    return nested({name.removeprefix("params."): x for name, x in arrays.items() if name.startswith("params.")})


@pytest.mark.parametrize("scanned", [True, False])
@pytest.mark.parametrize("family", KEYS)
def test_logits_are_those_of_transformers(tmp_path: pathlib.Path, family: str, scanned: bool) -> None:
    arrays = hf_families.arrays_of(family)
    checkpoint = maxtext_checkpoints.save(tmp_path / "ckpt", maxtext_checkpoints.params_of(family, arrays, scanned))
    done, found = carried(tmp_path, family, checkpoint)
    assert (done.step, done.with_optimizer, done.scanned) == (0, False, scanned)
    ids = jnp.asarray(arrays["in/ids"], jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
    batch = NestedMap(ids=ids, segment_ids=jnp.ones_like(ids), segment_pos=positions)
    model = fdl.build(config_of(family).task.model)
    logits = jax.jit(lambda v: model.apply(v, batch, method="compute_predictions"))({"params": params_in(found)}).logits
    np.testing.assert_allclose(logits, arrays["out/logits"], **LOGITS)
