"""Layouts of random formats, and of seven families of Hugging Face, go there and back bit by bit."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paxcli.checkpoint.reading import named_leaves
from paxcli.convert.layout import Layers, Layout, Rule, Slot, compare_to_model, from_pax, pax_layers
from paxcli.convert.steps import deinterleave, reshape, split, transpose, unstack
from tests.convert.filling import to_pax
from tests.models import hf_families

Arrays = dict[str, np.ndarray]


def assert_same(found: Arrays, expected: Arrays) -> None:
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        np.testing.assert_array_equal(found[name], x)
        assert found[name].dtype == x.dtype


def one_stack(count: int, axis: int = 0) -> Layers:
    return dataclasses.replace(Layers.of_stacks("layers", 1, (count,)), axis=axis)


@st.composite
def layers(draw: st.DrawFn, count: int) -> Layers:
    kind = draw(st.sampled_from(["stacked", "unstacked", "interleaved", "with a remainder", "in stages"]))
    if kind == "unstacked":
        return Layers.of_stacks("layer_{}", count)
    axis = draw(st.integers(0, 1))
    if kind == "stacked":
        return one_stack(count, axis)
    size = draw(st.sampled_from([n for n in range(1, count + 1) if count % n == 0]))
    if kind == "interleaved":
        return Layers(tuple(Slot({"layer": f"turn_{i % size}"}, i // size) for i in range(count)), axis)
    if kind == "with a remainder":
        slots = [Slot({"layer": "layers"}, i) for i in range(count - 1)]
        return Layers((*slots, Slot({"layer": "last"})), axis)
    return Layers(tuple(Slot({"layer": f"layer_{i % size}"}, i // size) for i in range(count)), dims=(count // size, 1))


@st.composite
def rules(draw: st.DrawFn, number: int, in_layers: bool) -> tuple[Rule, tuple[int, ...]]:
    """A rule and the shape of a layer of their tensor."""
    shape = tuple(draw(st.lists(st.sampled_from([2, 4, 6]), min_size=1, max_size=3)))
    steps, names, now = [], 1, shape
    for step in draw(st.lists(st.sampled_from(["transpose", "reshape", "deinterleave"]), max_size=3)):
        if step == "transpose":
            order = draw(st.permutations(range(len(now))))
            now = tuple(now[axis] for axis in order)
            steps.append(transpose(*order))
        elif step == "deinterleave" and now[-1] % 2 == 0:
            steps.append(deinterleave())
        elif step == "reshape":
            steps.append(reshape(now, (math.prod(now[:-1]), now[-1])))
            now = (math.prod(now[:-1]), now[-1])
    last = draw(st.sampled_from(["", "unstack", "split"]))
    axis = draw(st.integers(0, len(now) - 1))
    if last == "unstack" and len(now) > 1:
        steps.append(unstack(axis))
        names = now[axis]
    elif last == "split" and now[axis] > 1:
        steps.append(split(axis, 1, now[axis] - 1))
        names = 2
    if draw(st.booleans()):
        steps += [deinterleave(*range(names - 1, names))] if names > 1 and now[-1] % 2 == 0 and last == "" else []
    before = "{layer}." if in_layers else ""
    pax = tuple(f"{before}pax_{number}_{part}" for part in range(names))
    foreign, pax = f"{before}foreign_{number}", pax if names > 1 else pax[0]
    return Rule(foreign, pax, tuple(steps), scale=draw(st.sampled_from([1.0, 0.5]))), shape


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_random_layouts_go_there_and_back(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 6))
    drawn = [data.draw(rules(i, in_layers=bool(i))) for i in range(data.draw(st.integers(1, 4)))]
    layout = Layout(tuple(rule for rule, _ in drawn), data.draw(layers(count)), data.draw(layers(count)))
    random, foreign = np.random.RandomState(0), {}
    for rule, shape in drawn:
        (name,) = rule.names("foreign")
        side = layout.layers(name, "foreign")
        for tensor, numbers in side.tensors(name).items():
            foreign[tensor] = side.arrange(numbers, random.randn(len(numbers), *shape).astype(np.float32))
    for kind in ("params", "mu", "nu"):
        pax = to_pax(layout, foreign, kind)
        assert_same(dict(from_pax(layout, pax, kind)), foreign)
        assert_same(to_pax(layout, dict(from_pax(layout, pax, kind)), kind), pax)
    pax = to_pax(layout, foreign)
    differences = compare_to_model(layout, pax, foreign)
    assert not differences and set(differences.matched) == set(foreign)
    assert layout.without_rule(pax) == layout.without_rule(foreign, "foreign") == []
    assert layout.only(pax) == layout.only(foreign, "foreign") == layout


@pytest.mark.parametrize("family", ["llama2", "llama31", "mistral", "mixtral", "qwen3", "gemma2", "neox"])
def test_families_of_hugging_face_go_there_and_back(family: str) -> None:
    arrays = hf_families.arrays_of(family)
    hf = {name.removeprefix("param/"): x for name, x in arrays.items() if name.startswith("param/")}
    hf = hf if family == "neox" else hf_families.as_saved(hf)
    layout = hf_families.layout_of(family)
    pax = named_leaves(hf_families.params_of(family, arrays))
    for name in layout.without_rule(hf, "foreign"):
        del hf[name]
    assert_same(dict(from_pax(layout, pax)), hf)
    assert not compare_to_model(layout, pax, hf)


def test_differences_are_named() -> None:
    rules = (Rule("a", "x"), Rule("h.{layer}.b", "stack.{layer}.y", (transpose(1, 0),)), Rule("c", "z"))
    layout = Layout(rules, Layers.of_stacks("{}", 2), one_stack(2))
    params = {"x": np.zeros(3), "stack.layers.y": np.zeros((2, 5, 4)), "z": np.zeros(2), "more": np.zeros(1)}
    found: dict[str, Any] = {"a": np.zeros(3), "h.0.b": np.zeros((4, 5)), "h.1.b": np.zeros((5, 4)), "d": np.zeros(1)}
    differences = compare_to_model(layout, params, found)
    assert differences.matched == ["a", "h.0.b"] and differences.missing == ["c"] and differences.unexpected == ["d"]
    assert differences.mismatched == {"h.1.b": "`h.1.b` is [5, 4] there, [4, 5] here"}
    assert differences.text() == "`h.1.b` is [5, 4] there, [4, 5] here; it lacks `c`; only it has `d`"
    assert layout.without_rule(params) == ["more"] and layout.without_rule(found, "foreign") == ["d"]


def test_a_stack_is_read_as_a_view_and_one_tensor_at_a_time() -> None:
    stack = np.zeros((4, 3, 2))
    rules, ours = (Rule("{layer}.w", "stack.{layer}.w"),), one_stack(4)
    ((_, x),) = from_pax(Layout(rules, one_stack(4, 1), ours), {"stack.layers.w": stack})
    assert x.shape == (3, 4, 2) and np.shares_memory(x, stack)
    asked = []

    class Source:
        def __getitem__(self, name: str) -> np.ndarray:
            asked.append(name)
            return stack

    next(iter(from_pax(Layout(rules, Layers.of_stacks("layers_{}", 4), ours), Source())))
    assert asked == ["stack.layers.w"]


def test_layers_of_pax_are_inferred_from_names() -> None:
    def found(names: list[str], num_layers: int, *shape: int) -> Layers:
        return pax_layers({name: np.zeros(shape) for name in names}, num_layers)

    assert found(["stack.layers.attention.query"], 2) == one_stack(2)
    assert found(["stack.layers_0.attention.query"], 2) == Layers.of_stacks("layers_{}", 2)
    interleaved = found(["stack.layers.turn_0.norm.scale", "stack.layers.turn_1.norm.scale"], 4)
    assert [slot.index for slot in interleaved.slots] == [0, 0, 1, 1]
    stages = found(["stack.stages.layers.post"], 6, 2, 3, 5)
    assert stages.dims == (2, 3) and stages.slots[4] == Slot({"layer": "stages.layers"}, 4)
    rounds = found(["stack.repeats.stages.layers_1.post"], 8, 2, 2, 5)
    assert rounds.dims == (2, 2) and rounds.slots[5] == Slot({"layer": "repeats.stages.layers_1"}, 2)


def test_the_inverse_of_a_step_undoes_it() -> None:
    x = np.arange(2 * 12.0).reshape(2, 12)
    for step in (deinterleave(), reshape((12,), (3, 4)), split(0, 5, 7), unstack(0)):
        (again,) = step.inverse.to_pax(step.to_pax([x]))
        np.testing.assert_array_equal(again, x)
    assert jax.tree.map(np.shape, list(split(0, 5, 7).to_pax([x]))) == [(2, 5), (2, 7)]
