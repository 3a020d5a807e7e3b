"""Every number that a recipe can hold states the range that it takes."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import typing
from typing import Annotated, Any

import pytest

from paxcli.config.configurable import Configurable
from paxcli.config.fields import AnyFloat, Mark, PositiveInt, Range, annotation_of, marks_of, out_of_range

ROOMS = ("layers", "models", "optim", "inputs", "mesh", "checkpoint", "training")


def configurable_classes() -> list[type]:
    found = {}
    for room in ROOMS:
        package = importlib.import_module(f"paxcli.{room}")
        for module in pkgutil.walk_packages(package.__path__, f"paxcli.{room}."):
            for value in vars(importlib.import_module(module.name)).values():
                if inspect.isclass(value) and issubclass(value, Configurable) and dataclasses.is_dataclass(value):
                    found[f"{value.__module__}.{value.__qualname__}"] = value
    return [found[name] for name in sorted(found)]


def has_bare_number(annotation: Any) -> bool:
    """Whether an `int` or `float` in it states no range."""
    if typing.get_origin(annotation) is Annotated:
        base, *facts = typing.get_args(annotation)
        return not any(isinstance(fact, Range) for fact in facts) and has_bare_number(base)
    if typing.get_origin(annotation) is typing.Literal:
        return False
    return annotation in (int, float) or any(map(has_bare_number, typing.get_args(annotation)))


@pytest.mark.parametrize("annotation", [int, float | None, tuple[int, ...], dict[str, int] | list[PositiveInt]])
def test_the_check_sees_a_number_without_a_range(annotation):
    assert has_bare_number(annotation)
    assert not has_bare_number(PositiveInt | list[AnyFloat] | None)


def test_every_number_states_its_range():
    classes = configurable_classes()
    assert len(classes) > 60
    bare = [
        f"{cls.__module__}.{cls.__name__}.{field.name}"
        for cls in classes
        for field in dataclasses.fields(cls)
        if has_bare_number(annotation_of(cls, field.name))
    ]
    assert bare == []


def test_facts_can_be_read():
    from paxcli.training.task import Train

    steps = annotation_of(Train, "num_train_steps")
    assert out_of_range("steps", 0, steps) == "steps must be at least 1 and at most 2147483647 (steps) or null, not 0."
    assert marks_of(steps) == {Mark.SAFE_ON_RESUME}
    assert marks_of(annotation_of(Train, "learner"))
