"""Programs that `pax train` keeps for its next start."""

from __future__ import annotations

import json
import os
import pathlib

import pytest

from paxcli.programs import program_cache

SMALL = ("train_input=SyntheticInput", "num_layers=1", "num_train_steps=3", "eval_inputs=[]")
SMALL += ("train_input.input_random_seed=7",)

OWN_RECIPE = """
import paxcli as pax
from paxcli.config.recipe import recipe

@recipe()
def own():
    return pax.load("tiny").config
"""


@pytest.mark.slow
def test_a_start_uses_the_programs_of_an_earlier_one_if_nothing_changed(pax, tmp_path: pathlib.Path) -> None:
    environment = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"), "JAX_LOG_COMPILES": "1"}
    kept = tmp_path / "cache" / "programs"

    def train(run: str, *sets: str, recipe: str = "tiny", **variables: str) -> tuple[list[float], bool, bool]:
        """The losses, and whether both programs were lowered, and compiled or found in JAX's cache."""
        assigned = [f"--set={one}" for one in (*SMALL, *sets)]
        done = pax("train", recipe, *assigned, "--run-dir", run, env=environment | variables)
        assert done.returncode == 0, done.stderr
        lines = (tmp_path / run / "metrics.jsonl").read_text().splitlines()
        done_to = {}
        for work in ("jaxpr to MLIR module conversion", "XLA compilation of"):
            names = {name for name in ("train_step", "_create") if f"Finished {work} jit({name})" in done.stderr}
            assert len(names) in (0, 2), names
            done_to[work] = bool(names)
        return [json.loads(line)["loss"] for line in lines], *done_to.values()

    losses, *work = train("first")
    assert work == [True, True] and len(losses) == 2, "steps 1 and 3"
    entries = sorted(kept.iterdir())
    assert len(entries) == 2, "the step, and the program that creates the state"
    assert train("second") == (losses, False, False)

    for entry in entries:
        described, _, executable = entry.read_bytes().partition(b"\n")
        facts = json.loads(described)
        assert any(file.endswith("paxcli/layers/matmul.py") for file in facts["files"])
        older = facts | {"files": {file: [0, 0] for file in facts["files"]}}
        entry.write_bytes(json.dumps(older).encode() + b"\n" + executable)
    assert train("source_changed") == (losses, True, False), "the programs are still the same"
    assert train("source_unchanged") == (losses, False, False)

    if os.getuid() == 0:
        for entry in entries:
            os.chown(entry, 1, -1)
        assert train("foreign") == (losses, True, True), "entries of another user are not used"
        for entry in entries:
            os.chown(entry, 0, -1)

    for entry in entries:
        entry.write_bytes(entry.read_bytes()[:-1000])
    assert train("damaged") == (losses, True, True)

    faster, *work = train("faster", "learning_rate=0.5")
    assert work == [True, True] and faster[0] == losses[0] and faster[1] != losses[1], "no step of another recipe"
    (tmp_path / "own.py").write_text(OWN_RECIPE)
    before = sorted(kept.iterdir())
    for run in ("own_first", "own_second"):  # code of the user may do anything
        assert train(run, recipe="own.py")[1]
    assert train("off", JAX_ENABLE_COMPILATION_CACHE="false") == (losses, True, True)
    assert sorted(kept.iterdir()) == before


def test_a_file_that_changes_while_a_program_is_compiled_is_not_taken_for_its_source(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, during = tmp_path / "before.py", tmp_path / "during.py"
    for file in (before, during):
        file.write_text("")
    os.utime(before, (1e9, 1e9))
    monkeypatch.setattr(program_cache, "find_own_code", dict)
    monkeypatch.setattr(program_cache, "module_files", lambda: {"before": str(before), "during": str(during)})
    entry = program_cache._Entry(tmp_path / "programs" / "entry")
    entry.save(b"program")
    kept = json.loads(entry.path.read_bytes().partition(b"\n")[0])["files"]
    now = program_cache._stat(kept)
    assert kept[str(before)] == now[str(before)] and kept[str(during)] != now[str(during)]


def test_a_cache_that_cannot_be_written_does_not_end_the_run(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a directory of another user's cannot: there too, not even the temporary file can be looked for."""
    monkeypatch.setattr(program_cache, "find_own_code", dict)
    (tmp_path / "programs").touch()
    program_cache._Entry(tmp_path / "programs" / "entry").save(b"program")
