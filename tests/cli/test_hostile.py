"""Random values, damaged YAML and damaged data: a mistake of the user's each time, never a bug, a hang or a crash."""

from __future__ import annotations

import contextvars
import json
import os
import pathlib
import signal
from collections.abc import Callable, Iterator

import hypothesis
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from etils import epath
from hypothesis import strategies as st

from paxcli.cli.main import app
from paxcli.cli.output import run
from paxcli.config.fields import union_members
from paxcli.config.load import load
from paxcli.config.tree import walk
from paxcli.inputs.token_files import TokenFileInfo, write_token_file
from paxcli.inputs.tokenizers import ByteTokenizer
from tests.inputs.formats import write_array_record, write_jsonl

# A command only prints NumPy's warnings, of 1e300 as float32 for example; in tests, warnings are errors.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SMALL = ["--set=num_layers=1", "--set=model_dims=16", "--set=max_seq_len=16", "--set=global_batch_size=2"]
YAML = b"""recipe: tiny
overlays: [cpu]
set:
  num_layers: 1
  learning_rate: 1.0e-3
  train_input.seq_len: 16
  mesh.ici_mesh_shape: {data: 1}
"""
RECIPES = ("tiny-synthetic", "llama-1b", "c4-1b", "lm-cloud-transformer-test", "bert-spmd-l4-h128")
INTEGERS = ["-1", "0", "1", "2", "3", "7", "8", "100", "65536", "2147483648", "1" + "0" * 18, "1" + "0" * 29]
FLOATS = ["-1", "0", "1e-30", "0.1", "0.999", "1", "1e6", "1e38", "1e300", "nan", "inf"]
ODD = [
    "null",
    "true",
    "x",
    "[]",
    "[1, 2]",
    "[[1]]",
    "{}",
    "{a: 1}",
    "{data: -1}",
    "ByteTokenizer",
    "RmsNorm",
    "1" * 400,
]
ODD += [
    "SyntheticInput",
    "2020-13-45",
    "!!python/object:os.system x",
    "&a [*a]",
    "[" * 60,
    "\udc80",
    "{? [a] : b}",
    "%s",
]
FILES = ["a.jsonl", "a.jsonl.gz", "a.parquet", "a.arrayrecord", "a.bin", "a.bin.json", "a.bin.index", "chat.jsonl"]
INSERTED = [
    b"[",
    b"{",
    b": ",
    b"\n",
    b"\t",
    b"- ",
    b"*a",
    b"!!x ",
    b"\xff",
    b"\0",
    b"\\ud83d",
    b'"',
    b"9" * 30,
    b"null",
]
SECONDS = 120  # of one command, on a busy machine


def _settings(examples: int) -> Callable:
    checks = list(hypothesis.HealthCheck)
    return hypothesis.settings(
        max_examples=examples, deadline=None, derandomize=True, database=None, suppress_health_check=checks
    )


@pytest.fixture(scope="module")
def pax(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., int]]:
    """Runs `pax ARGS…` in this process, in a directory of its own. A command that hangs raises TimeoutError."""

    def expire(*_: object) -> None:
        raise TimeoutError

    def command(*arguments: str) -> int:
        signal.alarm(SECONDS)
        try:
            return contextvars.copy_context().run(run, app, arguments)
        finally:
            signal.alarm(0)

    before, handler = os.getcwd(), signal.signal(signal.SIGALRM, expire)
    os.chdir(tmp_path_factory.mktemp("hostile"))
    yield command
    os.chdir(before)
    signal.signal(signal.SIGALRM, handler)


# Where in the recipe's list of fields, one value of each kind, and whether to take the odd one.
CHOICES = st.tuples(st.floats(0, 1), *map(st.sampled_from, (INTEGERS, FLOATS, ODD)), st.integers(0, 3))


@st.composite
def damages(draw: st.DrawFn) -> Callable[[bytes], bytes]:
    """Cuts, flips, inserts, removes or repeats bytes of a file."""
    where, kind = draw(st.floats(0, 1)), draw(st.integers(0, 4))
    inserted, number = draw(st.sampled_from(INSERTED)), draw(st.integers(1, 20))

    def damage(content: bytes) -> bytes:
        at = int(where * (len(content) - 1))
        return [
            content[:at],
            content[:at] + bytes([content[at] ^ (1 << number % 8)]) + content[at + 1 :],
            content[:at] + inserted + content[at:],
            content[:at] + content[at + number :],
            content[:at] + content,
        ][kind]

    return damage


def check_choice(pax: Callable[..., int], recipe: str, choice: tuple[float, str, str, str, int]) -> None:
    """Sets one field of a recipe, mostly to a value of its type."""
    where, integer, number, odd, is_odd = choice
    fields = walk(load(recipe).config)
    field = fields[int(where * (len(fields) - 1))]
    kinds = union_members(field.annotation)
    typed = integer if int in kinds else number if float in kinds else odd
    check_value(pax, recipe, f"{field.path}={odd if is_odd == 0 else typed}")


def check_value(pax: Callable[..., int], recipe: str, assignment: str) -> None:
    small = [option for option in SMALL if option.partition("=")[2].partition("=")[0] not in assignment]
    if recipe.startswith("tiny"):
        assert pax("train", recipe, "--dry-run", *small, f"--set={assignment}") in (0, 2)
    else:
        assert pax("recipes", "show", recipe, f"--set={assignment}") in (0, 2)


def check_yaml(pax: Callable[..., int], damage: Callable[[bytes], bytes]) -> None:
    pathlib.Path("mine.yaml").write_bytes(damage(YAML))
    assert pax("recipes", "show", "mine.yaml") in (0, 2)


def check_data(pax: Callable[..., int], name: str, damage: Callable[[bytes], bytes], skip: bool) -> None:
    _write_data(name)
    pathlib.Path(name).write_bytes(damage(pathlib.Path(name).read_bytes()))
    kind = "ChatInput" if name == "chat.jsonl" else "TextInput"
    file = "a.bin" if name.startswith("a.bin") else name
    values = [f"--set=train_input={kind}", f"--set=train_input.files=[{file}]"]
    values += ["--set=train_input.on_bad_record=skip"] if skip else []
    assert pax("inspect-input", "tiny", "--num-batches=1", *SMALL, *values) in (0, 5)


def _write_data(name: str) -> None:
    texts = [f"document {i} é" for i in range(40)]
    if name.startswith("a.jsonl"):
        write_jsonl(pathlib.Path(name), texts)
    elif name == "a.parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), name)
    elif name == "a.arrayrecord":
        write_array_record(pathlib.Path(name), [json.dumps({"text": text}).encode() for text in texts])
    elif name == "chat.jsonl":
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        pathlib.Path(name).write_text(f"{json.dumps({'messages': turns})}\n" * 9)
    else:
        documents = [np.array([5, 6, 7, 1])] * 50
        write_token_file(epath.Path(pathlib.Path("a.bin").resolve()), documents, TokenFileInfo.of(ByteTokenizer()), [])


@pytest.mark.parametrize(
    ("recipe", "assignment"),
    [
        ("llama-1b", "task.model.num_heads=65536"),
        ("tiny-synthetic", f"task.model.num_layers={10**19}"),
        ("tiny-synthetic", f"task.model.num_layers={10**29}"),
        ("c4-1b", f"task.model.mtp_num_layers={10**29}"),
        ("tiny-synthetic", f"task.model.dims_per_head={2**63 - 1}"),
        ("tiny", "task.model.head=RmsNorm"),
        ("tiny-synthetic", "task.model.stack=TiedEmbedding"),
        ("tiny-synthetic", "task.model.dims_per_head=1"),
        ("tiny-synthetic", "train_input=RandomAccessInput"),
    ],
)
def test_values_that_were_bugs_or_hung(pax, recipe, assignment):
    check_value(pax, recipe, assignment)


@_settings(8)
@hypothesis.given(choice=CHOICES)
def test_values(pax, choice):
    check_choice(pax, RECIPES[0], choice)


@_settings(8)
@hypothesis.given(damage=damages())
def test_yaml(pax, damage):
    check_yaml(pax, damage)


@_settings(8)
@hypothesis.given(name=st.sampled_from(FILES), damage=damages(), skip=st.booleans())
def test_data(pax, name, damage, skip):
    check_data(pax, name, damage, skip)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@_settings(300)
@hypothesis.given(recipe=st.sampled_from(RECIPES), choice=CHOICES)
def test_three_hundred_values(pax, recipe, choice):
    check_choice(pax, recipe, choice)


@pytest.mark.slow
@_settings(100)
@hypothesis.given(damage=damages())
def test_a_hundred_damaged_yaml_recipes(pax, damage):
    check_yaml(pax, damage)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@_settings(100)
@hypothesis.given(name=st.sampled_from(FILES), damage=damages(), skip=st.booleans())
def test_a_hundred_damaged_data_files(pax, name, damage, skip):
    check_data(pax, name, damage, skip)
