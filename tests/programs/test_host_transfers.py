"""Host transfers of a program whose copies are known by construction."""

from __future__ import annotations

from paxcli.programs.hlo import read_program
from paxcli.programs.host_transfers import count_host_transfers
from tests.programs.hlo_texts import COLLECTIVES, ON_HOST


def test_only_copies_between_device_and_host_are_counted() -> None:
    moved = 2 * 512 * 128 * 2
    assert count_host_transfers(read_program(ON_HOST)) == {"count": 2, "bytes": 2 * moved}
    assert count_host_transfers(read_program(COLLECTIVES)) == {"count": 0, "bytes": 0}
