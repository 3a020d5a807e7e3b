"""Power failure: the system calls of a save and of a replaced file, in the order in which they reached the kernel."""

from __future__ import annotations

import pathlib
import re
import shutil
import subprocess
import sys

import pytest

SAVE = """
import sys
import jax.numpy as jnp
from paxcli.checkpoint.maintenance import copy_checkpoints
from paxcli.checkpoint.manager import CheckpointStore
from paxcli.checkpoint.policy import Checkpoint
from paxcli.config.paths import replace_text

replace_text(sys.argv[1] + "/recipe.yaml", "recipe: tiny")
with CheckpointStore(sys.argv[1] + "/checkpoints", Checkpoint(save_interval_steps=1)) as store:
    for step in (1, 2):
        store.save(step, {"w": jnp.arange(1000.0), "b": jnp.ones(3)}, {"position": step})
copy_checkpoints(sys.argv[1], sys.argv[1] + "/copy")
"""


@pytest.mark.skipif(not shutil.which("strace"), reason="needs strace")
def test_files_and_directories_are_synced_around_the_rename_that_commits(tmp_path):
    trace = tmp_path / "trace"
    calls = "trace=fsync,fdatasync,rename,renameat,renameat2"
    command = ["strace", "-f", "-y", "-e", calls, "-o", str(trace), sys.executable, "-c", SAVE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if "PTRACE" in done.stderr:
        pytest.skip("this user cannot trace processes")
    assert done.returncode == 0, done.stderr
    lines = trace.read_text().splitlines()
    committed = {
        final: number
        for number, line in enumerate(lines)
        for final in (
            str(tmp_path / "checkpoints" / "1"),
            str(tmp_path / "checkpoints" / "2"),
            str(tmp_path / "copy/checkpoints/2"),
        )
        if "rename" in line and f', "{final}"' in line
    }
    assert len(committed) == 3
    for final, number in committed.items():
        source = re.search(r'"([^"]+)", (?:AT_FDCWD[^,]*, )?"', lines[number])[1]
        synced = {path for line in lines[:number] for path in re.findall(r"sync\(\d+<([^>]+)>", line)}
        names = [path.relative_to(final) for path in (pathlib.Path(final), *pathlib.Path(final).rglob("*"))]
        assert len(names) > 8
        assert {str(pathlib.Path(source) / name) for name in names} <= synced, final
        parent = str(pathlib.Path(final).parent)
        assert any(f"<{parent}>" in line for line in lines[number + 1 :] if "fsync" in line)

    recipe = next(i for i, line in enumerate(lines) if "recipe.yaml.tmp" in line and "rename" in line)
    assert any("recipe.yaml.tmp>" in line for line in lines[:recipe] if "fsync" in line)
    assert any(f"<{tmp_path}>" in line for line in lines[recipe + 1 :] if "fsync" in line)
