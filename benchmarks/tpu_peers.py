"""Predicted train steps on TPUs of MaxText and pax side by side: both compiled by one libtpu, and read by one reader.

    python benchmarks/tpu_peers.py DIRECTORY --maxtext-python PYTHON [--only gemma …] [--out results/tpu_peers.json]
    python benchmarks/tpu_peers.py --table benchmarks/results/tpu_peers.json docs/compile.md

For each row of `tpu_peers.yaml`, MaxText compiles its own launch, and pax the recipe that `pax maxtext-convert` makes
of it: the same model, batch, chips, remat and flags. The optimized HLO is kept in DIRECTORY; what is there is not
compiled again. A step takes 1 to 10 minutes to compile. PYTHON: see `peers/maxtext_compile.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
from typing import Any

import yaml
from calibration import convert, pax, read_arguments, write_result
from tpu_aot import read_hlo

HERE = pathlib.Path(__file__).parent
ROWS = pathlib.Path(__file__).with_suffix(".yaml")
MARKS = "<!-- side by side -->\n", "<!-- end of the side by side -->\n"
EQUAL = "attention=flash dataset_type=synthetic enable_checkpointing=false"


def compare(row: dict[str, Any], flags: list[str], directory: pathlib.Path, python: str | None) -> dict[str, Any]:
    """One row: seconds, memory and parts of both steps."""
    slices = row.get("slices", 1)
    row = row | {"slices": slices, "launch": f"{row['launch']} {EQUAL}", "date": "2026-08-01"}
    if "ici_fsdp_parallelism" not in row["launch"]:
        row["launch"] += " ici_fsdp_parallelism=-1"
    if slices > 1:
        row["launch"] += " dcn_data_parallelism=-1"
    recipe, _ = convert(row, slices, directory)
    options = " ".join(f"--{flag}" for flag in flags)
    maxtext = compile_maxtext(row, recipe.with_name(f"{recipe.stem}-maxtext.hlo"), options, python)
    ours = compile_pax(row, recipe, options)
    speed = round(maxtext["seconds"] / ours["seconds"], 3)
    return {"name": row["name"], "source": row["source"], "maxtext": maxtext, "pax": ours, "speed": speed}


def compile_maxtext(row: dict[str, Any], hlo: pathlib.Path, options: str, python: str | None) -> dict[str, Any]:
    """MaxText's step, read by pax."""
    if not hlo.exists():
        where = [f"compile_topology={row['topology']}", f"compile_topology_num_slices={row['slices']}"]
        settings = ["run_name=unused", "base_output_directory=unused", "hardware=tpu", *row["launch"].split(), *where]
        command = [python or sys.exit("Name `--maxtext-python`."), str(HERE / "peers" / "maxtext_compile.py"), str(hlo)]
        done = subprocess.run(
            [*command, *settings], env=os.environ | {"LIBTPU_INIT_ARGS": options}, capture_output=True, text=True
        )
        if done.returncode:
            sys.exit(f"{row['name']}: {done.stderr[-2000:]}")
    facts = json.loads(hlo.with_suffix(".json").read_text())
    found = read_hlo(hlo, row["topology"], row["slices"], None, coordinates=facts["devices"])
    needed = facts["total_bytes"] if facts["temporary_host_bytes"] else facts["peak_memory_bytes"]
    return facts_of(found) | {"bytes": needed, "on_host": facts["temporary_host_bytes"]}


def compile_pax(row: dict[str, Any], recipe: pathlib.Path, options: str) -> dict[str, Any]:
    """Pax's step."""
    hlo, report = recipe.with_suffix(".hlo"), recipe.with_suffix(".json")
    if not hlo.exists():
        where = ["--topology", row["topology"], "--slices", str(row["slices"]), "--overlay", "synthetic-data"]
        text = pax("compile", str(recipe), *where, "--hlo", str(hlo), "--json", LIBTPU_INIT_ARGS=options)
        report.write_text(text)
    facts = json.loads(report.read_text())
    found = read_hlo(hlo, row["topology"], row["slices"], None, (str(recipe), (), ()))
    return facts_of(found) | {"bytes": facts["hbm_needed_bytes"], "on_host": facts["memory"]["host_bytes"]}


def facts_of(found: dict[str, Any]) -> dict[str, Any]:
    seconds = found["predicted_step_seconds"]
    parts = {part: round(seconds * share, 4) for part, share in found["shares"].items()}
    return {"seconds": seconds, "parts": parts, "largest": found["costs"], "left_out": found["left_out"]}


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = [
        "| step | MaxText s (GiB) | pax s (GiB) | MaxText's over pax's | less s: matmuls | kernels | other | waiting |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        theirs, ours = row["maxtext"], row["pax"]
        # XLA names fusions of attention in pax's step only.
        saved = {part: seconds - ours["parts"][part] for part, seconds in theirs["parts"].items()}
        other, waiting = saved["attention"] + saved["other"], sum(saved[part] for part in saved if "exposed" in part)
        parts = [f"{seconds:.2f}" for seconds in (saved["matmul"], saved["kernels"], other, waiting)]
        cells = [row["name"], _size(theirs), _size(ours), f"{row['speed']:.2f}", *parts]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _size(step: dict[str, Any]) -> str:
    return f"{step['seconds']:.2f} ({'≤ ' if step['on_host'] else ''}{step['bytes'] / 2**30:.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--maxtext-python")
    args = read_arguments(parser, MARKS, table)
    spec, rows = yaml.safe_load(ROWS.read_text()), []
    for row in spec["rows"]:
        if any(word.lower() in row["name"].lower() for word in args.only):
            rows.append(compare(row, spec["flags"][row["flags"]], args.directory, args.maxtext_python))
            print(f"{row['name']}: {rows[-1]['speed']}", file=sys.stderr, flush=True)
    speeds = [row["speed"] for row in rows]
    write_result({"rows": rows, "median_speed": statistics.median(speeds), "least_speed": min(speeds)}, args.out)


if __name__ == "__main__":
    main()
