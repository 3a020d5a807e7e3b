"""The threads in which a run compiles and reads its first batch."""

from __future__ import annotations

import subprocess
import sys

from tests.training.runs import small

# `lazy_imports` replaces `__import__` for all threads. JAX imports modules while it traces and compiles.
SCRIPT = """
import sys, threading
from etils import epy

entered, lazy_imports = [], epy.lazy_imports

def recorded(**options):
    entered.append([thread.name for thread in threading.enumerate()])
    return lazy_imports(**options)

epy.lazy_imports = recorded
from paxcli.cli.startup import main
try:
    main()
except SystemExit as ended:
    assert not ended.code
beside = {name for names in entered for name in names if name.startswith("start-up")}
assert entered and not beside, entered
"""


def test_no_library_replaces_imports_while_the_threads_run(tmp_path) -> None:
    options = [*small(num_train_steps=1, save_interval_steps=1, eval_inputs="[]"), "--run-dir", str(tmp_path / "run")]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, "train", "tiny", *options], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
