"""`pax profile`: what traces tell."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from paxcli.cli.options import JsonOption
from paxcli.cli.output import say_result

app = typer.Typer(no_args_is_help=True, help="Read the traces that training made.")

TraceArgument = Annotated[
    str, typer.Argument(metavar="DIR", help="A run directory, whose newest trace it is, or the directory of a trace.")
]
TopOption = Annotated[int, typer.Option("--top", min=1, help="How many operations and layers to show. Default: 10.")]


@app.command()
def summarize(directory: TraceArgument, top: TopOption = 10, as_json: JsonOption = False) -> None:
    """Say where the time of traced steps went: kinds of work, layers, operations, gaps, memory.

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
    lines = [f"{result['trace']}: {steps} steps, {result['seconds']:.3f} s on devices: {result['devices']}"]
    if steps:
        lines[0] += f", {result['step_seconds'] * 1e3:.2f} ms a step"
    lines += ["", "Time of the devices"]
    lines += [f"  {share:5.1f}%  {kind}" for kind, share in _rounded(result["shares"]).items()]
    if result["hidden_collective_share"]:
        lines.append(f"  collectives ran beside other work for another {result['hidden_collective_share']:.1%}")
    lines += ["", "Layers"]
    lines += [f"  {layer['share']:6.1%}  {layer['layer']}" for layer in result["layers"][:top]]
    lines += ["", "Operations"]
    lines += [
        f"  {one['share']:6.1%}  {one['count']:>6} x {one['name']:<36} {one['category']:<10} {one['layer']}"
        for one in result["operations"]
    ]
    lines += ["", f"Gaps of 10 us and more: {gaps['count']}, {gaps['seconds']:.3f} s"]
    lines += [f"  {gap['seconds'] * 1e3:.2f} ms, the host in: {gap['host']}" for gap in gaps["longest"]]
    lines += ["", "Memory"] if memory else []
    lines += [f"  {bytes_ / 2**20:12,.1f} MiB  {name.removesuffix('_bytes')}" for name, bytes_ in memory.items()]
    return "\n".join(lines)


def _rounded(shares: dict[str, float]) -> dict[str, float]:
    """Shares in percent with one decimal, which still add up to 100: those cut most are rounded up."""
    tenths = {name: int(share * 1000) for name, share in shares.items()}
    cut_most = sorted(shares, key=lambda name: tenths[name] - shares[name] * 1000)
    for name in cut_most[: 1000 - sum(tenths.values())]:
        tenths[name] += 1
    return {name: tenth / 10 for name, tenth in tenths.items()}
