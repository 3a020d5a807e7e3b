"""Holds predicted step times on TPUs against those that MaxText's maintainers published.

    python benchmarks/calibration.py DIRECTORY [--only v5e …] [--out benchmarks/results/calibration.json]
    python benchmarks/calibration.py --table benchmarks/results/calibration.json docs/compile.md

The first converts each launch of `calibration.yaml`, compiles pax's step for it, and compares the predicted TFLOP/s of
a chip, by MaxText's own formula, with the published figure. The optimized HLO is kept in DIRECTORY, and what is there
is not compiled again: a changed prediction takes seconds to check. A row takes 2 to 40 minutes to compile. The
published programs were MaxText's, of the compilers of their day: an error includes the difference of the programs.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import yaml
from tpu_aot import read_hlo, write_table

ROWS = pathlib.Path(__file__).with_suffix(".yaml")
MARKS = "<!-- calibration -->\n", "<!-- end of the calibration -->\n"


def convert(row: dict[str, Any], slices: int, directory: pathlib.Path) -> tuple[pathlib.Path, float]:
    """The recipe of a launch, and the TFLOPs of its step on one device by MaxText's formula of that date."""
    stem = directory / f"{row['name'].replace(', ', '_').replace(' ', '-')}@{slices}"
    script, recipe = stem.with_name(f"{stem.name}.sh"), stem.with_name(f"{stem.name}.yaml")
    script.write_text(f"python3 MaxText/train.py MaxText/configs/base.yml {row['launch']}\n")
    recipe.unlink(missing_ok=True)
    where = ["--topology", row["topology"], "--slices", str(slices), "--date", str(row["date"])]
    report = pax("maxtext-convert", str(script), *where, "--out", str(recipe), "--json")
    return recipe, json.loads(report)["maxtext_tflops_per_device"]


def pax(*arguments: str, **variables: str) -> str:
    """The stdout of a command of pax; ends with its errors if it fails."""
    command = [sys.executable, "-m", "paxcli", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | variables)
    if done.returncode:
        sys.exit(f"{' '.join(command)}:\n{done.stderr}")
    return done.stdout


def compare(row: dict[str, Any], slices: int, flags: list[str], directory: pathlib.Path) -> dict[str, Any]:
    """One row: published and predicted TFLOP/s of a chip."""
    recipe, tflops = convert(row, slices, directory)
    hlo = recipe.with_suffix(".hlo")
    if not hlo.exists():
        options = " ".join(f"--{flag}" for flag in flags)
        where = ["--topology", row["topology"], "--slices", str(slices), "--overlay", "synthetic-data"]
        pax("compile", str(recipe), *where, "--hlo", str(hlo), LIBTPU_INIT_ARGS=options)
    found = read_hlo(hlo, row["topology"], slices, None, (str(recipe), (), ()))
    predicted = tflops / found["predicted_step_seconds"]
    published = row["published"][slices]
    return {
        "name": row["name"],
        "slices": slices,
        "published_tflops": published,
        "predicted_tflops": round(predicted, 1),
        "error": round(predicted / published - 1, 4),
        "predicted_step_seconds": found["predicted_step_seconds"],
        "shares": found["shares"],
        "left_out": found["left_out"],
        "source": row["source"],
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    errors = [abs(row["error"]) for row in rows]
    return {"compared": len(errors), "median_error": statistics.median(errors), "worst_error": max(errors)}


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = ["| model and slice | slices | published TFLOP/s a chip | predicted | error |", "|---|---|---|---|---|"]
    lines += [
        f"| {row['name']} | {row['slices']} | {row['published_tflops']:g} | {row['predicted_tflops']:.0f} "
        f"| {row['error']:+.1%} |"
        for row in rows
    ]
    total = summary(rows)
    end = f"{total['compared']} rows: median error {total['median_error']:.1%}, largest {total['worst_error']:.1%}."
    return "\n".join([*lines, "", end]) + "\n"


def read_arguments(
    parser: argparse.ArgumentParser, marks: tuple[str, str], table: Callable[[list[dict[str, Any]]], str]
) -> argparse.Namespace:
    """The arguments of a benchmark that compiles rows into a directory; with `--table`, writes the table and exits."""
    parser.add_argument("directory", type=pathlib.Path, nargs="?")
    parser.add_argument("--only", nargs="+", default=[""], help="rows whose names contain one of these words")
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--table", type=pathlib.Path, nargs=2, metavar=("RESULTS", "PAGE"))
    args = parser.parse_args()
    if args.table:
        results, page = args.table
        write_table(page, marks, table(json.loads(results.read_text())["rows"]))
        sys.exit()
    args.directory.mkdir(parents=True, exist_ok=True)
    return args


def write_result(result: dict[str, Any], out: pathlib.Path | None) -> None:
    """Prints a result as JSON, and writes it to `out`."""
    text = json.dumps(result, indent=1)
    if out:
        out.write_text(text + "\n")
    print(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args = read_arguments(parser, MARKS, table)
    spec, rows = yaml.safe_load(ROWS.read_text()), []
    for row in spec["rows"]:
        for slices in row["slices"]:
            if not any(word in row["name"] for word in args.only):
                continue
            rows.append(compare(row, slices, spec["flags"][row["flags"]], args.directory))
            print(f"{row['name']} × {slices}: {rows[-1]['error']:+.1%}", file=sys.stderr, flush=True)
    write_result({"rows": rows} | summary(rows), args.out)


if __name__ == "__main__":
    main()
