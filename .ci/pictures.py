"""Draws the pictures of the documentation, and screenshots of its pages. `make pictures` runs it.

Written to docs/pictures: `rooms.svg` and `step.svg`, drawn here; `run.svg`, a terminal in which a model is trained;
`loss.svg`, its curves. Written to build/pictures, to be looked at: further terminals, and ten pages at two widths where
Chromium is installed.
"""

from __future__ import annotations

import contextlib
import html
import io
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs" / "pictures"
LOOK = ROOT / "build" / "pictures"
TRAIN = "pax train tiny --set summary_interval_steps=100"
TERMINALS = {
    "recipes": "pax recipes ls",
    "show": "pax recipes show tiny",
    "help": "pax train --help",
    "error": "pax train tiny --set num_layer=3",
    "plot": "pax plot runs/tiny",
    "decode": 'pax decode runs/tiny --prompt "def " --max-tokens 80',
}
SCREENS = ("", "getting-started", "learn/sharding", "learn/own-parts", "training", "meshes", "verbs/train", "glossary")
SCREENS += ("reference/python", "reference/fields")
WIDTHS = (1280, 390)
FONT = "font-family='ui-sans-serif, system-ui, Helvetica, Arial, sans-serif'"


def boxes(rows: list[list[tuple[str, str]]], title: str, arrows: list[str], width: int = 860) -> str:
    """A drawing of rows of boxes, each with a name and a description, and a label between two rows."""
    height, gap, top = 58, 34, 44
    parts = [f"<text x='{width / 2}' y='26' text-anchor='middle' font-size='17' font-weight='600'>{title}</text>"]
    for number, row in enumerate(rows):
        y = top + number * (height + gap)
        size = (width - 20 - 12 * (len(row) - 1)) / len(row)
        for column, (name, text) in enumerate(row):
            x = 10 + column * (size + 12)
            fill = ("#e8eefc", "#e6f4ea", "#fef3e0", "#f3e8fd")[number % 4]
            parts.append(
                f"<rect x='{x}' y='{y}' width='{size}' height='{height}' rx='7' fill='{fill}' stroke='#5f6b7a'/>"
            )
            middle = x + size / 2
            shown = html.escape(name)
            place = f"x='{middle}' text-anchor='middle'"
            parts.append(f"<text {place} y='{y + 24}' font-size='14' font-weight='600'>{shown}</text>")
            parts.append(f"<text {place} y='{y + 43}' font-size='11.5'>{html.escape(text)}</text>")
        if number < len(rows) - 1:
            start, end = y + height + 3, y + height + gap - 4
            parts.append(f"<path d='M{width / 2} {start}V{end}' stroke='#333' marker-end='url(#arrow)'/>")
            label = html.escape(arrows[number]) if number < len(arrows) else ""
            parts.append(f"<text x='{width / 2 + 10}' y='{start + 18}' font-size='11.5' fill='#444'>{label}</text>")
    total = top + len(rows) * (height + gap) - gap + 12
    arrow = "<marker id='arrow' viewBox='0 0 8 8' refX='6' refY='4' markerWidth='8' markerHeight='8' orient='auto'>"
    arrow += "<path d='M0 0L8 4L0 8z' fill='#333'/></marker>"
    body = "\n".join(parts)
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {total}' {FONT} fill='#1b1f24'>\n"
        f"<defs>{arrow}</defs>\n<rect width='{width}' height='{total}' fill='#fff'/>\n{body}\n</svg>\n"
    )


ROOMS = [
    [("cli", "one file for each verb")],
    [("api", "the Python API")],
    [("recipes", "what to train")],
    [("profiling", "traces, PGLE"), ("convert", "Hugging Face, MaxText, Pax")],
    [("programs", "compiled steps, prediction"), ("inference", "evaluate, decode")],
    [("training", "experiment, learner, step, loop")],
    [("checkpoint", "save, restore, verify"), ("metrics", "meters, writers, curves")],
    [("models", "networks, losses, decoding")],
    [("layers", "one in a file"), ("optim", "optimizers, schedules"), ("inputs", "data, tokenizers")],
    [("mesh", "axes, rules, shardings")],
    [("config", "find, load, change recipes")],
    [("cloud", "TPU slices, VMs, jobs"), ("nested_map", "the type of batches")],
]
STEP = [
    [("input", "rows of this host, by number"), ("train state", "step, parameters, moments: sharded")],
    [("batch", "ids, labels, weights, segments: sharded over data, fsdp, expert")],
    [("microbatch 1 … M", "one gradient each: gradient accumulation")],
    [("embedding", "ids to [B, T, D]"), ("layers", "scanned; FSDP gathers each"), ("head, loss", "chunks of logits")],
    [("backward pass", "recomputes what the remat policy did not save; reduces gradients over the mesh")],
    [("learner", "clip, optimizer, learning rate × schedule, skip if not finite")],
    [("new train state", "in the memory of the old one"), ("metrics", "fetched while later steps run")],
]
STEP_ARROWS = ["one jitted function from here", "split", "forward pass", "", "mean of the microbatches", "update"]


def run(command: str, folder: pathlib.Path) -> str:
    """What a command prints in a terminal of 100 columns, but for its progress bar."""
    words = [sys.executable, "-m", "paxcli", *shlex.split(command)[1:]]
    environment = {**os.environ, "COLUMNS": "100", "FORCE_COLOR": "1", "PYTHONPATH": str(ROOT)}
    ours, its = os.openpty()
    output = b""
    with tempfile.TemporaryFile() as errors:
        streams = dict(stdin=subprocess.DEVNULL, stdout=its, stderr=errors)
        with subprocess.Popen(words, cwd=folder, env=environment, **streams):
            os.close(its)
            with contextlib.suppress(OSError):  # the end of a terminal
                while chunk := os.read(ours, 4096):
                    output += chunk
        os.close(ours)
        errors.seek(0)
        return errors.read().decode() + output.decode().replace("\r\n", "\n")


def terminal(texts: dict[str, str], path: pathlib.Path, title: str = "pax") -> None:
    """A picture of a terminal: each command after a prompt, and its output. Loads no font from another site."""
    from rich.console import Console
    from rich.text import Text

    console = Console(record=True, width=124, file=io.StringIO(), force_terminal=True)
    for command, text in texts.items():
        console.print(Text.assemble(("$ ", "bold green"), (command, "bold")))
        console.print(Text.from_ansi(text.rstrip()))
    svg = console.export_svg(title=title)
    svg = re.sub(r"@font-face\s*\{.*?\}", "", svg, flags=re.DOTALL)
    path.write_text(svg.replace("Fira Code, monospace", "ui-monospace, Menlo, Consolas, monospace"))


def draw_documentation(folder: pathlib.Path) -> None:
    """The pictures that pages and README show."""
    import paxcli as pax

    PICTURES.mkdir(exist_ok=True)
    (PICTURES / "rooms.svg").write_text(boxes(ROOMS, "A package imports from those below it", []))
    (PICTURES / "step.svg").write_text(boxes(STEP, "One training step", STEP_ARROWS))
    terminal({TRAIN: run(TRAIN, folder)}, PICTURES / "run.svg")
    pax.Run(folder / "runs" / "tiny").plot(metrics=["loss"], path=PICTURES / "loss.svg")


def look(folder: pathlib.Path) -> None:
    """Pictures to be looked at: terminals, and pages in a browser."""
    LOOK.mkdir(parents=True, exist_ok=True)
    for name, command in TERMINALS.items():
        terminal({command: run(command, folder)}, LOOK / f"{name}.svg")
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    mkdocs = pathlib.Path(sys.executable).with_name("mkdocs")
    if browser is None or not mkdocs.exists():
        print("No screenshots: they need Chromium and the extra `docs`.", file=sys.stderr)
        return
    site = folder / "site"
    subprocess.run([mkdocs, "build", "--strict", "--quiet", "-d", site, "--no-directory-urls"], cwd=ROOT, check=True)
    for page in SCREENS:
        for width in WIDTHS:
            screenshot(browser, site / f"{page or 'index'}.html", width)


def screenshot(browser: str, page: pathlib.Path, width: int) -> None:
    """A picture of the top of a page, as wide as a screen or a telephone."""
    image = LOOK / f"{page.stem}-{width}.png"
    flags = ["--headless=new", "--no-sandbox", "--hide-scrollbars", "--disable-gpu", "--virtual-time-budget=3000"]
    subprocess.run(
        [browser, *flags, f"--window-size={width},1600", f"--screenshot={image}", page.as_uri()],
        check=True,
        capture_output=True,
    )


def main() -> None:
    """Draws everything; with `--drawings` only what needs no training."""
    folder = pathlib.Path(tempfile.mkdtemp())
    if "--drawings" in sys.argv:
        PICTURES.mkdir(exist_ok=True)
        (PICTURES / "rooms.svg").write_text(boxes(ROOMS, "A package imports from those below it", []))
        (PICTURES / "step.svg").write_text(boxes(STEP, "One training step", STEP_ARROWS))
        return
    draw_documentation(folder)
    look(folder)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
