"""Capturing XLA's log."""

from __future__ import annotations

import os
import sys

from paxcli.profiling.xla_log import XlaLog

USED = "I1121 02:30:40.859288 19779 gpu_hlo_schedule.cc:579] Using PGLE profile for module from fdo_profile (binary)\n"


def test_info_messages_are_captured_and_the_rest_reaches_stderr(capfd):
    with XlaLog() as log:
        os.write(2, USED.encode() + b"E1121 02:30:40.859288 1 x.cc:1] real trouble\n")
        print("from Python", file=sys.stderr)
        assert log.wait_for("Using PGLE profile") == USED.rstrip()
        assert log.wait_for("something else", seconds=0.1) is None
    print("afterwards", file=sys.stderr)
    passed = capfd.readouterr().err
    assert all(text in passed for text in ("real trouble", "from Python", "afterwards")) and "PGLE" not in passed
