"""The table of what pax's remat policies save is that of the layers."""

from __future__ import annotations

from typing import get_args

import jax
import pytest

from paxcli.convert.maxtext import tables
from paxcli.layers.remat import Activation, save_as, saveable

SAVED_ON_DEVICE = tables.table("remat")["saved_on_device"]


@pytest.mark.parametrize("policy", SAVED_ON_DEVICE)
def test_the_table_has_what_a_policy_saves(policy) -> None:
    saves = saveable(policy)
    assert saves is not None
    (named,) = jax.make_jaxpr(lambda x: save_as("query", x))(1.0).eqns
    saved = {name for name in get_args(Activation) if saves(named.primitive, name=name)}
    expected = set(SAVED_ON_DEVICE[policy])
    if policy.startswith("dots_with_no_batch_dims"):  # projections are saved as matmuls, whatever their names
        expected &= {"context"}
    assert saved == expected
