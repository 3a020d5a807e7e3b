"""Collectives of programs whose communication is known by construction."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from paxcli.programs.collectives import Collective, Interconnect, count_collectives, find_collective
from paxcli.programs.hlo import read_program
from tests.programs.hlo_texts import COLLECTIVES, MIB, V4


def test_collectives_are_counted_with_their_loops() -> None:
    found = {one["kind"]: (one["count"], one["bytes"]) for one in count_collectives(read_program(COLLECTIVES), V4)}
    assert found == {
        "all-gather": (5, 5 * 2 * MIB),
        "all-reduce": (5, 5 * 2 * MIB),
        "collective-permute": (1, MIB // 2),
    }


def test_a_ring_receives_over_two_links() -> None:
    ring = Interconnect("v4", [(0, x, 0, 0) for x in range(4)], (4, 1, 1), (True, False, False))
    assert (ring.links(range(4)), ring.links([0, 1])) == (2, 1)


def test_a_member_of_an_all_gather_receives_the_shards_of_the_others() -> None:
    assert Collective("all-gather", 400, None, False, "", "sync").received_bytes(4) == 300


def test_a_program_of_one_device_has_no_collectives() -> None:
    step = jax.jit(lambda x: jnp.sum(x @ x))
    program = read_program(step.lower(jnp.ones((64, 64))).compile().as_text())
    assert all(find_collective(program, one) is None for one, _ in program.scheduled_instructions())
