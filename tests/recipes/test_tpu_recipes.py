"""Every recipe for TPUs, compiled for the slices that it is for by the real compiler: `make test-tpu`."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

from paxcli.config.resolve import resolve
from paxcli.programs.ahead_of_time import target_of

ROOT = pathlib.Path(__file__).resolve().parents[2]
ENTRIES = json.loads((ROOT / "benchmarks" / "tpu_recipes.json").read_text())
IN_TEST_ALL = {"c4-1b", "c4-16b", "c4-22b-2xv4-128"}

# Models of MaxText whose layers no recipe has: latent attention, shared experts, sinks, chunks, a norm after experts.
CONVERTED = [
    (name, slices)
    for name, of_each in (
        ("deepseek2-16b", ("v5p-16", "v6e-16")),
        ("gpt-oss-20b", ("v5p-16", "v6e-16")),
        ("llama4-17b-16e", ("v5p-64", "v6e-128")),
        ("envy-switch-base", ("v5p-16", "v6e-16")),
    )
    for slices in of_each
]


def marked(entry: dict):
    mark = pytest.mark.slow if entry["recipe"] in IN_TEST_ALL else pytest.mark.tpu
    return pytest.param(entry, id=entry["recipe"], marks=mark)


def _compile(pax, *words: str) -> tuple[subprocess.CompletedProcess, dict]:
    """`pax compile`, optimized as users do, and its report."""
    full = {name: "0" for name in os.environ if name == "JAX_DISABLE_MOST_OPTIMIZATIONS"}
    done = pax("compile", *words, "--json", timeout=4 * 3600, env=full)
    return done, json.loads(done.stdout)


def _assert_fits(done: subprocess.CompletedProcess, report: dict) -> None:
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert report["fits"] and report["hbm_needed_bytes"] <= report["hbm_available_bytes"]
    assert report["stacked_all_gathers"] == []


def test_every_entry_names_a_recipe_and_slices_of_its_size() -> None:
    for entry in ENTRIES:
        config = resolve(entry["recipe"]).config
        target = target_of(config, entry.get("topology"), entry.get("slices"))
        assert target.platform == "tpu"


def test_the_table_of_the_documentation_is_that_of_the_results(tmp_path) -> None:
    page, results = ROOT / "docs" / "compile.md", ROOT / "benchmarks" / "results" / "tpu_aot.json"
    copy = tmp_path / "compile.md"
    copy.write_text(page.read_text())
    command = [sys.executable, str(ROOT / "benchmarks" / "tpu_aot.py"), "--table", str(results), str(copy)]
    subprocess.run(command, check=True, timeout=60)
    assert copy.read_text() == page.read_text()


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("entry", [marked(entry) for entry in ENTRIES])
def test_a_recipe_fits_its_slices(entry, pax) -> None:
    where = [word for name in ("topology", "slices") if name in entry for word in (f"--{name}", str(entry[name]))]
    sets = [word for value in entry.get("set", ()) for word in ("--set", value)]
    done, report = _compile(pax, entry["recipe"], *where, *sets)
    if "too_large" in entry:
        assert done.returncode == 2 and report["hbm_needed_bytes"] > report["hbm_available_bytes"]
        return
    _assert_fits(done, report)
    assert report["memory"]["alias_bytes"] >= report["state_bytes_per_device"]


@pytest.mark.tpu
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize(("name", "slices"), CONVERTED)
def test_a_model_of_maxtext_fits_its_slices(name, slices, pax) -> None:
    keys = [f"model_name={name}", "ici_fsdp_parallelism=-1", "dataset_type=synthetic", "max_target_length=4096"]
    keys += ["per_device_batch_size=1", "steps=10"]
    converted = pax("maxtext-convert", *keys, "--topology", slices, "--out", "model.yaml")
    assert converted.returncode == 0, converted.stderr
    _assert_fits(*_compile(pax, "model.yaml", "--topology", slices))
