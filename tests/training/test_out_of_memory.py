"""A recipe that its device cannot hold: an error that says what to change, and a snapshot."""

from __future__ import annotations

import gzip

import jax
import jax.numpy as jnp
import pytest
from etils import epath
from jax.sharding import AbstractMesh

from paxcli.config.resolve import resolve
from paxcli.errors import ConfigError
from paxcli.mesh.axes import MESH_AXES
from paxcli.training.out_of_memory import SNAPSHOT, advice, explain_out_of_memory
from paxcli.training.session import build_session
from tests.training.runs import small


@pytest.fixture
def session():
    sets = [option.removeprefix("--set=") for option in small(**{"task.model.vocab_size": 50_000})]
    with build_session(resolve("tiny", (), [*sets, "remat_policy=dots"]).config).active() as opened:
        yield opened


def test_the_error_of_xla_says_what_to_change(session, tmp_path):
    with pytest.raises(ConfigError) as caught, explain_out_of_memory(session, epath.Path(tmp_path / "profile")):
        jax.block_until_ready(jnp.zeros((1 << 45,)))
    assert caught.value.exit_code == 2
    assert "does not fit into the memory of cpu: Out of memory allocating" in caught.value.message
    hint = caught.value.hint
    assert [hint.index(way) for way in ("num_microbatches=2", "remat_policy=nothing", "logits", "fsdp")]
    assert SNAPSHOT in caught.value.message
    assert gzip.decompress((tmp_path / "profile" / SNAPSHOT).read_bytes())


def test_where_the_state_alone_is_too_large_nothing_else_helps(session):
    (only,) = advice(session, capacity=1000)
    assert "shard them" in only


def test_microbatches_divide_rows_over_experts_too(session):
    """A row for each device of an `expert` axis: smaller microbatches would not help."""
    sizes = tuple(session.global_batch_size if axis == "expert" else 1 for axis in MESH_AXES)
    on_experts = session._replace(mesh=AbstractMesh(sizes, MESH_AXES))
    assert any("num_microbatches" in way for way in advice(session, None))
    assert not any("num_microbatches" in way for way in advice(on_experts, None))


def test_other_errors_pass(session, tmp_path):
    with pytest.raises(ValueError, match="unrelated"), explain_out_of_memory(session, epath.Path(tmp_path)):
        raise ValueError("unrelated")
