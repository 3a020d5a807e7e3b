"""A recipe file with an experiment in small: nested, typed, with templates, a shared part and inputs."""

from __future__ import annotations

import pathlib

import pytest

MINE = '''
from __future__ import annotations

import dataclasses
import enum
import functools
from typing import Literal

import fiddle as fdl

from paxcli.config.configurable import Configurable, part, template
from paxcli.config.recipe import recipe


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclasses.dataclass
class Norm(Configurable):
    dims: int
    epsilon: float = 1e-6


@dataclasses.dataclass
class Block(Configurable):
    model_dims: int
    norm: functools.partial = template(Norm)
    act: Literal["gelu", "relu"] = "gelu"


@dataclasses.dataclass
class Model(Configurable):
    num_layers: int
    model_dims: int = 8
    dropout: float | None = None
    block: functools.partial = template(Block, act="relu")
    tied: Norm | None = None
    head: Norm | None = None


@dataclasses.dataclass
class Train(Configurable):
    learning_rate: float = 1e-3
    global_batch_size: int | None = None
    percore_batch_size: float | None = None
    verbose: bool = False
    color: Color = Color.RED
    betas: tuple[float, float] = (0.9, 0.99)


@dataclasses.dataclass
class Input(Configurable):
    name: str = "data"
    files: list[str] | None = None
    batch_size: int | None = None


@dataclasses.dataclass
class Mesh(Configurable):
    ici_mesh_shape: dict[str, int] | list[int] | None = None


@dataclasses.dataclass
class Root(Configurable):
    model: Model
    train: Train = part(Train)
    inputs: list[Input] = dataclasses.field(default_factory=list)
    mesh: Mesh = part(Mesh)


# What the model is wide.
WIDTH = 16


@recipe()
def small() -> fdl.Config[Root]:
    """A small one.

    More about it.
    """
    return _root(2)


@recipe("Pax4Small")
def shared_4() -> fdl.Config[Root]:
    """Two names of one norm."""
    config = small()
    config.model.head = config.model.tied = Norm.config(dims=3)
    config.train.percore_batch_size = 0.5
    return config


@recipe()
def broken() -> fdl.Config[Root]:
    """Has a mistake."""
    config = _root(2)
    config.model.num_layer = 3
    return config


@recipe()
def unfinished() -> fdl.Config[Root]:
    """Lacks a number."""
    return Root.config(model=Model.config())


@recipe()
def _hidden():
    return None


def _root(num_layers):
    model = Model.config(num_layers=num_layers, model_dims=WIDTH)
    return Root.config(model=model, inputs=[Input.config(name="a"), Input.config(name="b", files=["x"])])
'''


@pytest.fixture
def mine(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path
