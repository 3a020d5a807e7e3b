"""Compiles recipes for TPUs, without a TPU: memory, traffic, predicted step time.

    python benchmarks/tpu_aot.py benchmarks/tpu_targets.json --out benchmarks/results/tpu_aot.json
    python benchmarks/tpu_aot.py benchmarks/tpu_recipes.json --out benchmarks/results/tpu_aot.json
    python benchmarks/tpu_aot.py --hlo other_trainer.txt --topology v4-128 --flops 2.2e15
    python benchmarks/tpu_aot.py --table benchmarks/results/tpu_aot.json docs/compile.md

The first two compile a list, each entry in a process of its own, and skip entries that are in the output. With
`--keep DIRECTORY` they keep the optimized HLO there, and predict the entries that they skip once more. An entry has a
`recipe`, and may have a `label`, a `topology`, `slices`, and lists `overlays` and `set`, as options of `pax`;
`too_large` is the reason why one cannot fit. The third reads the optimized HLO of another trainer's step, with its mesh
in the order of libtpu's devices; `--flops` are its model FLOPs on one device. The last writes the table of the
documentation.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import time
from typing import Any

KEPT = (
    "fits", "topology", "num_slices", "num_devices", "mesh", "global_batch_size", "remat_policy", "parameters",
    "hbm_needed_bytes", "hbm_available_bytes", "memory", "state_bytes_per_device", "predicted_step_seconds",
    "predicted_mfu", "predicted_tokens_per_second", "shares", "communication_seconds", "collectives", "host_transfers",
    "kernels", "left_out", "stacked_all_gathers", "compiler_options", "compile_seconds", "flops_per_step", "error",
)  # fmt: skip
MARKS = "<!-- table -->\n", "<!-- end of the table -->\n"


def compile_one(entry: dict[str, Any], timeout: float, directory: pathlib.Path | None = None) -> dict[str, Any]:
    """The output of `pax compile --json` for an entry; `error` where it failed. HLO is kept in the directory."""
    command = [sys.executable, "-m", "paxcli", "compile", entry["recipe"], "--json"]
    command += ["--hlo", str(directory / f"{name_of(entry)}.hlo")] if directory else []
    for option in ("topology", "slices"):
        command += [f"--{option}", str(entry[option])] if option in entry else []
    for name in entry.get("overlays", ()):
        command += ["--overlay", name]
    for value in entry.get("set", ()):
        command += ["--set", value]
    began = time.time()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
        report = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        report = {"error": f"not compiled within {timeout:.0f} s"}
    except json.JSONDecodeError:
        report = {"error": f"the compiler ended with {done.returncode}: {done.stderr.strip()[-300:]}"}
    kept = {name: report[name] for name in KEPT if name in report}
    return entry | kept | {"seconds": round(time.time() - began)}


def read_hlo(
    path: pathlib.Path,
    topology: str,
    slices: int,
    flops: float | None,
    recipe: tuple[str, Any, Any] | None = None,
    coordinates: list[list[int]] | None = None,
) -> dict[str, Any]:
    """Today's prediction for a compiled step.

    Args:
      path: Its optimized HLO.
      topology: The slice that it was compiled for.
      slices: Number of slices.
      flops: Its model FLOPs on one device; None = unknown.
      recipe: Recipe, overlays and values, whose mesh it has; None = the mesh is in the order of the devices.
      coordinates: Slice and coordinates of each device of another trainer's mesh, in its order.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"
    import fiddle as fdl

    from paxcli.config.resolve import resolve
    from paxcli.mesh.mesh import build_mesh
    from paxcli.metrics.peaks import peak_flops
    from paxcli.programs.ahead_of_time import read_step
    from paxcli.programs.hlo import read_program
    from paxcli.programs.topologies import find_compile_target, hide_accelerators

    hide_accelerators()
    target = find_compile_target(topology, slices)
    devices = target.devices()
    if recipe:
        devices = list(build_mesh(fdl.build(resolve(*recipe).config.mesh), devices).devices.flat)
    if coordinates:
        by_place = {(getattr(one, "slice_index", 0) or 0, *one.coords): one for one in devices}
        devices = [by_place[tuple(place)] for place in coordinates]
    total = flops * len(devices) if flops else None
    return read_step(read_program(path.read_text()), target, devices, peak_flops(devices[0].device_kind), total)


def read_again(row: dict[str, Any], directory: pathlib.Path) -> dict[str, Any]:
    """A row of results under today's prediction, if its HLO was kept."""
    path = directory / f"{name_of(row)}.hlo"
    if not path.exists() or "predicted_step_seconds" not in row:
        return row
    recipe = row["recipe"], row.get("overlays", ()), row.get("set", ())
    found = read_hlo(path, row["topology"], row["num_slices"], row["flops_per_step"] / row["num_devices"], recipe)
    tokens = row["predicted_tokens_per_second"] * row["predicted_step_seconds"]
    found["predicted_tokens_per_second"] = tokens / found["predicted_step_seconds"]
    return row | {name: found[name] for name in KEPT if name in found}


def name_of(entry: dict[str, Any]) -> str:
    """The name of an entry's files."""
    return "-".join(filter(None, [entry["recipe"], entry.get("label", "").replace("`", "")]))


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = [
        "| recipe | compiled for | remat | GiB of a device | predicted s a step | predicted MFU | published |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        name = row["recipe"] + (f", {row['label']}" if row.get("label") else "")
        if "error" in row:
            why = row["error"]
            why = why["message"].split(": ")[-1].rstrip(".") if isinstance(why, dict) else why
            lines.append(f"| {name} | {_where(row)} | {row.get('remat_policy', '')} | {why} | | | |")
            continue
        needed, available = row.get("hbm_needed_bytes"), row["hbm_available_bytes"]
        most = "≤ " if row["memory"].get("host_bytes") else ""
        memory = f"{most}{needed / 2**30:.2f} of {available / 2**30:.2f}" if needed else ""
        step, mfu = row.get("predicted_step_seconds"), row.get("predicted_mfu")
        predicted = f"{step:.3g} | {mfu:.1%}" if step and mfu else " | "
        lines.append(
            f"| {name} | {_where(row)} | {row['remat_policy']} | {memory} | {predicted} | {row.get('published', '')} |"
        )
    return "\n".join(lines) + "\n"


def _where(row: dict[str, Any]) -> str:
    slices = row.get("num_slices", row.get("slices", 1))
    return f"{slices} × {row.get('topology', '')}" if slices > 1 else row.get("topology", "")


def write_table(page: pathlib.Path, marks: tuple[str, str], rows: str) -> None:
    """Replaces the text between two marks of a page."""
    text = page.read_text()
    start, end = (text.index(mark) for mark in marks)
    page.write_text(f"{text[: start + len(marks[0])]}\n{rows}\n{text[end:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("entries", type=pathlib.Path, nargs="?")
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--timeout", type=float, default=3600, help="seconds for each entry")
    parser.add_argument("--keep", type=pathlib.Path, metavar="DIRECTORY")
    parser.add_argument("--hlo", type=pathlib.Path)
    parser.add_argument("--topology")
    parser.add_argument("--slices", type=int, default=1)
    parser.add_argument("--flops", type=float)
    parser.add_argument("--table", type=pathlib.Path, nargs=2, metavar=("RESULTS", "PAGE"))
    args = parser.parse_args()
    if args.table:
        results, page = args.table
        write_table(page, MARKS, table(json.loads(results.read_text())))
        return
    if args.hlo:
        print(json.dumps(read_hlo(args.hlo, args.topology, args.slices, args.flops), indent=1))
        return
    rows = json.loads(args.out.read_text()) if args.out and args.out.exists() else []
    done = {(row["recipe"], row.get("label")): row for row in rows}
    if args.keep:
        args.keep.mkdir(parents=True, exist_ok=True)
        done = {key: read_again(row, args.keep) for key, row in done.items()}
    for entry in json.loads(args.entries.read_text()):
        key = entry["recipe"], entry.get("label")
        if key not in done:
            done[key] = compile_one(entry, args.timeout, args.keep)
            print(key, done[key].get("predicted_mfu"), done[key].get("error", ""), file=sys.stderr, flush=True)
        if args.out:
            args.out.write_text(json.dumps(list(done.values()), indent=1) + "\n")
    if not args.out:
        print(json.dumps(list(done.values()), indent=1))


if __name__ == "__main__":
    main()
