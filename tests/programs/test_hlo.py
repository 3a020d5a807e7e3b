"""Reading HLO text: groups, loops."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from paxcli.programs.hlo import read_fingerprint, read_program
from tests.programs.hlo_texts import COLLECTIVES, WINDOWED


def test_replica_groups_are_read_in_every_notation() -> None:
    program = read_program(COLLECTIVES)
    groups = {one.name: one.replica_group for one, _ in program.scheduled_instructions() if one.replica_group}
    assert groups == {"whole": [0, 1, 2, 3], "g": [0, 2, 4, 6], "on": [0, 4]}


def test_trip_counts_follow_the_increment_of_the_counter() -> None:
    program = read_program(WINDOWED)
    assert {one.name: times for one, times in program.scheduled_instructions()}["done"] == 4


def test_the_trip_count_of_a_scan_compiled_here() -> None:
    """XLA:CPU's own text, of a scan of seven matmuls."""
    step = jax.jit(lambda x: jax.lax.scan(lambda c, _: (jnp.tanh(c @ x), None), x, length=7)[0])
    program = read_program(step.lower(jnp.ones((64, 64))).compile().as_text())
    (loop,) = [one for one, _ in program.scheduled_instructions() if one.opcode == "while"]
    assert program.trip_count(loop) == 7


def test_the_fingerprint_of_a_gpu_program() -> None:
    text = 'HloModule jit_train_step, is_scheduled=true, frontend_attributes={fingerprint_before_lhs="58e2a0b1"}'
    assert read_fingerprint(text) == "58e2a0b1"
    assert read_fingerprint("HloModule jit_f") is None
