"""`pax profile`: summarizes traces."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from paxcli.cli.options import JsonOption
from paxcli.cli.output import say_result

app = typer.Typer(no_args_is_help=True, help="Analyze the traces of training runs.")

TraceArgument = Annotated[
    str, typer.Argument(metavar="DIR", help="A run directory, for its newest trace; or the directory of a trace.")
]
TopOption = Annotated[int, typer.Option(min=1, help="Number of operations and layers to show. Default: 10.")]


@app.command()
def summarize(directory: TraceArgument, top: TopOption = 10, as_json: JsonOption = False) -> None:
    """Summarize where the time of traced steps went. Sums by kind of work, layer and operation. Lists gaps and memory.

    \b
    Examples:
      pax profile summarize runs/tiny
      pax profile summarize runs/tiny/profile/plugins/profile/2026_01_31_12_00_00 --json
    """
    from paxcli.profiling.summary import summarize

    result = summarize(directory, top)
    say_result(result, _text(result, top), as_json)


def _text(result: dict[str, Any], top: int) -> str:
    steps, gaps, memory = result["steps"], result["gaps"], result["memory"]
    lines = [f"{result['trace']}: {steps} steps, {result['seconds']:.3f} s on each of {result['devices']} devices"]
    if steps:
        lines[0] += f", {result['step_seconds'] * 1e3:.2f} ms a step"
    lines += ["", "Time of the devices"]
    lines += [f"  {share:6.1%}  {kind}" for kind, share in result["shares"].items()]
    if result["hidden_collective_share"]:
        lines.append(f"  hidden collectives (beside other work): another {result['hidden_collective_share']:.1%}")
    lines += ["", "Layers", *(f"  {layer['share']:6.1%}  {layer['layer']}" for layer in result["layers"][:top])]
    lines += ["", "Operations"]
    lines += [
        f"  {one['share']:6.1%}  {one['count']:>6} x {one['name']:<36} {one['category']:<10} {one['layer']}"
        for one in result["operations"]
    ]
    lines += ["", f"Gaps of 10 us or more: {gaps['count']}, {gaps['seconds']:.3f} s"]
    lines += [f"  {gap['seconds'] * 1e3:.2f} ms, host phase: {gap['host']}" for gap in gaps["longest"]]
    lines += ["", "Memory"] if memory else []
    lines += [f"  {bytes_ / 2**20:12,.1f} MiB  {name.removesuffix('_bytes')}" for name, bytes_ in memory.items()]
    return "\n".join(lines)
