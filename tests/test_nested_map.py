from __future__ import annotations

import copy
import pickle

import jax
import numpy as np
import pytest

from paxcli.nested_map import NestedMap


def test_attributes_are_entries():
    batch = NestedMap(ids=1)
    batch.labels = 2
    assert batch == {"ids": 1, "labels": 2}
    del batch.ids
    assert batch == {"labels": 2}
    with pytest.raises(AttributeError, match="`labels`"):
        _ = batch.labls


def test_is_a_pytree_in_sorted_order_whose_nested_dicts_stay():
    batch = NestedMap(b={"y": 2, "x": 1}, a=NestedMap(z=0))
    assert batch.flatten_items() == [("a.z", 0), ("b.x", 1), ("b.y", 2)]
    doubled = jax.tree.map(lambda leaf: leaf * 2, batch)
    assert doubled == {"a": {"z": 0}, "b": {"x": 2, "y": 4}}
    assert (type(doubled), type(doubled.a), type(doubled.b)) == (NestedMap, NestedMap, dict)


def test_goes_through_jit():
    assert jax.jit(lambda batch: batch.ids.sum())(NestedMap(ids=np.arange(4), other=np.ones(2))) == 6


@pytest.mark.parametrize("duplicate", [NestedMap.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_are_maps_of_their_own(duplicate):
    batch = NestedMap(ids=1)
    other = duplicate(batch)
    other.ids = 2
    assert type(other) is NestedMap
    assert batch.ids == 1
