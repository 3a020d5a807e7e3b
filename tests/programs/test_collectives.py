"""Collectives of programs whose communication is known by construction."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from paxcli.programs.attribution import attribute_instructions
from paxcli.programs.collectives import (
    Collective,
    Interconnect,
    count_collectives,
    count_host_transfers,
    find_all_gathers,
    find_collective,
)
from paxcli.programs.hlo import read_program
from tests.programs.hlo_texts import COLLECTIVES, COMBINED, MIB, ON_HOST, SPARSE_CORE, TPU7X, V4


def test_collectives_are_counted_with_their_loops() -> None:
    found = {one["kind"]: (one["count"], one["bytes"]) for one in count_collectives(read_program(COLLECTIVES), V4)}
    assert found == {
        "all-gather": (5, 5 * 2 * MIB),
        "all-reduce": (5, 5 * 2 * MIB),
        "collective-permute": (1, MIB // 2),
    }


def test_a_combined_collective_moves_all_of_its_arrays() -> None:
    both = (4 + 1) * 1024 * 1024 * 2  # bytes of the full arrays
    found = {one["kind"]: one["bytes"] for one in count_collectives(read_program(COMBINED), None)}
    assert found == dict.fromkeys(("all-gather", "all-reduce", "reduce-scatter"), both)


def test_collectives_on_sparse_cores_are_found() -> None:
    program = read_program(SPARSE_CORE)
    assert count_collectives(program, TPU7X) == [{"kind": "all-gather", "network": "ici", "count": 1, "bytes": MIB}]
    assert find_all_gathers(program, {(1024, 1024)}) == ["f8e4m3fn[1024,1024]"]
    assert attribute_instructions(program)["all-gather.1.call-start"].category == "collective"


def test_two_devices_of_a_chip_share_its_links() -> None:
    assert [TPU7X.links(group) for group in (range(8), range(4), [0, 4])] == [1, 0.5, 1]


def test_a_ring_receives_over_two_links() -> None:
    ring = Interconnect("v4", [(0, x, 0, 0) for x in range(4)], (4, 1, 1), (True, False, False))
    assert (ring.links(range(4)), ring.links([0, 1])) == (2, 1)


def test_a_member_of_an_all_gather_receives_the_shards_of_the_others() -> None:
    assert Collective("all-gather", 400, None, False, "", "sync").received_bytes(4) == 300


def test_only_copies_between_device_and_host_are_counted() -> None:
    moved = 2 * 512 * 128 * 2
    assert count_host_transfers(read_program(ON_HOST)) == {"count": 2, "bytes": 2 * moved}
    assert count_host_transfers(read_program(COLLECTIVES)) == {"count": 0, "bytes": 0}


def test_a_program_of_one_device_has_no_collectives() -> None:
    step = jax.jit(lambda x: jnp.sum(x @ x))
    program = read_program(step.lower(jnp.ones((64, 64))).compile().as_text())
    assert all(find_collective(program, one) is None for one, _ in program.scheduled_instructions())
