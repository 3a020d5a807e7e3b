"""Verifying that XLA scheduled by a profile of the same program."""

from __future__ import annotations

import pytest
from jax import monitoring

from paxcli.errors import DataError
from paxcli.profiling import apply
from paxcli.profiling.xla_log import XlaLog


def test_a_profile_that_xla_did_not_use_is_an_error():
    log = XlaLog()
    log.wait_for = lambda text: None
    with pytest.raises(DataError, match="did not use"):
        apply.compile_with_costs({"dot.1": 1.0}, log, lambda: None)


def test_a_program_from_the_cache_needs_no_log():
    def from_cache() -> str:
        monitoring.record_event("/jax/compilation_cache/cache_hits")
        return "program"

    log = XlaLog()
    log.wait_for = lambda text: pytest.fail("XLA logs nothing about a program that it does not compile")
    assert apply.compile_with_costs({"dot.1": 1.0}, log, from_cache) == "program"


@pytest.mark.parametrize(("name", "fits"), [("aa11::dot.1", True), ("dot.1", True), ("bb22::dot.1", False)])
def test_a_profile_of_another_program_is_an_error(name, fits):
    hlo = 'HloModule jit_train_step, frontend_attributes={fingerprint_before_lhs="aa11"}'
    if fits:
        apply.require_same_program(hlo, {name: 1.0})
    else:
        with pytest.raises(DataError, match="program bb22; this recipe compiles to aa11"):
            apply.require_same_program(hlo, {name: 1.0})
