"""The time of a device, divided among operations by hand."""

from __future__ import annotations

from paxcli.profiling.timeline import divide
from paxcli.profiling.trace import Span


def test_shares_and_idle_time_add_up():
    spans = [
        Span("matmul", 0, 10),
        Span("all-gather", 5, 20),  # 5 of its 15 are hidden
        Span("copy", 24, 30),
        Span("add", 26, 30),  # runs beside the copy
    ]
    found = divide(spans, lambda name: name == "all-gather")
    assert found.shares == [10, 10, 4, 2]
    assert (found.hidden, found.gaps, found.total) == (5, [(20, 24)], 30)
    assert sum(found.shares) + 24 - 20 == found.total


def test_two_executions_of_one_operation_count_each():
    found = divide([Span("dot", 0, 1), Span("dot", 3, 4)], lambda _: False)
    assert found.shares == [1, 1] and found.gaps == [(1, 3)]


def test_an_operation_of_no_duration_takes_no_time():
    found = divide(
        [Span("bitcast", 0, 0), Span("dot", 0, 10), Span("bitcast", 5, 5), Span("add", 30, 40)], lambda _: False
    )
    assert found.shares == [0, 10, 0, 10] and found.gaps == [(10, 30)]
