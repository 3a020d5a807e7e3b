"""The content of a report: all that the run directories say about their runs."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from etils import epath

from paxcli.config.paths import read_json, read_text, resolve_path
from paxcli.config.render import value_text
from paxcli.config.values import diff
from paxcli.errors import DataError
from paxcli.metrics.curves import RunMetrics, read_runs
from paxcli.metrics.writers import TRAIN, read_lines, read_records
from paxcli.training.run_dir import SAMPLES, RunDir

_MOST_POINTS = 4000
# Metrics by subject, in the order of the charts. Other metrics are shown on demand.
_GROUPS = {
    "Quality": ("loss", "log_pplx", "accuracy", "fraction_of_correct_next_step_preds"),
    "Optimization": ("learning_rate", "grad_norm", "param_norm", "skipped_steps"),
    "Speed": ("tokens_per_second", "mfu", "step_seconds", "input_wait_seconds", "peak_memory_bytes", "goodput"),
}
_FACTS = ("loss", "log_pplx", "tokens_per_second", "mfu", "peak_memory_bytes")


class ReportedRun(NamedTuple):
    """The content of a report about one run.

    Attributes:
      name: The name by which the report calls it.
      lines: Its metrics, those of later evaluations and decodes included.
      path: Its directory.
      values: The resolved recipe: path → value.
      recipe: The text of `recipe.yaml`.
      environment: The content of `environment.json`.
      goodput: The content of `goodput.json`; empty if there is none.
      samples: The lines of `samples.jsonl`.
    """

    name: str
    lines: list[dict[str, Any]]
    path: str
    values: dict[str, Any]
    recipe: str
    environment: dict[str, Any]
    goodput: dict[str, Any]
    samples: list[dict[str, Any]]

    @property
    def last_step(self) -> int:
        """The last step with metrics."""
        return max(line["step"] for line in self.lines)

    def facts(self) -> dict[str, Any]:
        """The last value of each metric that sums up a run: None if unknown, NaN for a loss that is not finite."""
        last = {name: value for line in self.lines if line["split"] == TRAIN for name, value in line.items()}
        last |= {name: math.nan for name in ("loss", "log_pplx") if last.get(name, 0) is None}
        return {name: last.get(name) for name in _FACTS} | {"goodput": self.goodput.get("goodput")}

    def curves(self) -> dict[str, dict[str, list[float | None]]]:
        """Split → `step` and each metric as columns of equal length. Long runs are thinned out to every n-th line."""
        found = {}
        for split in dict.fromkeys(line["split"] for line in self.lines):
            lines = self._lines_of(split)
            stride = max(math.ceil(len(lines) / _MOST_POINTS), 1)
            found[split] = _columns(lines, sorted({*range(0, len(lines), stride), len(lines) - 1}))
        return found

    def newest_evaluations(self, most: int) -> dict[str, tuple[int, dict[str, list[float | None]]]]:
        """Split of each evaluation → their number, and the columns of the last `most`, newest first."""
        found = {}
        for split in dict.fromkeys(line["split"] for line in self.lines if line["split"] != TRAIN):
            lines = self._lines_of(split)
            found[split] = len(lines), _columns(lines, list(range(len(lines)))[: -most - 1 : -1])
        return found

    def _lines_of(self, split: str) -> list[dict[str, Any]]:
        """The lines of a split by step. A step that a stopped run logged twice counts once, with its last line."""
        lines = {line["step"]: line for line in self.lines if line["split"] == split}
        return [lines[step] for step in sorted(lines)]


def _columns(lines: list[dict[str, Any]], kept: list[int]) -> dict[str, list[float | None]]:
    """The values of the kept lines by name: `step`, and every metric that any of the lines has."""
    names = dict.fromkeys(["step", *(name for line in lines for name in line if name != "split")])
    return {name: [lines[number].get(name) for number in kept] for name in names}


def read_reported_runs(run_dirs: Sequence[epath.PathLike]) -> list[ReportedRun]:
    """Reads run directories, finished or running, on this machine or in a bucket. Starts no device.

    Files other than the metrics may be missing, as in a copy of a part of a directory.

    Raises:
      DataError: A run has no metrics, or a file is damaged.
    """
    paths = [epath.Path(run_dir).expanduser() for run_dir in run_dirs]
    return [_read_run(path, metrics) for path, metrics in zip(paths, read_runs(run_dirs), strict=True)]


def _read_run(path: epath.Path, metrics: RunMetrics) -> ReportedRun:
    later = [line for folder in ("eval", "decoded") for line in read_lines(path / folder / "metrics.jsonl")]
    return ReportedRun(
        name=metrics.name,
        lines=metrics.lines + later,
        path=os.fspath(path),
        values=RunDir(path).original_config(),
        recipe=read_text(resolve_path(path / "recipe.yaml")) if (path / "recipe.yaml").exists() else "",
        environment=_read_object(path / "environment.json", dict.keys),
        goodput=_read_object(path / "goodput.json", _check_accounts),
        samples=list(_read_samples(path / SAMPLES)),
    )


def chart_groups(runs: Sequence[ReportedRun]) -> dict[str, list[str]]:
    """Group → the metrics that some run has a value of; those of no group are under `Other`."""
    lines = [line for run in runs for line in run.lines]
    present = {name: None for line in lines for name, value in line.items() if isinstance(value, int | float)}
    del present["step"]
    if all(line.get("log_pplx") in (None, line.get("loss")) for line in lines):
        present.pop("log_pplx", None)  # it is the loss
    grouped = {group: [name for name in names if name in present] for group, names in _GROUPS.items()}
    return grouped | {"Other": [name for name in present if not any(name in names for names in grouped.values())]}


def differing_values(runs: Sequence[ReportedRun]) -> list[tuple[str, list[str]]]:
    """The paths whose values are not the same in all recipes, with the value in each run."""
    paths = {path: None for run in runs[1:] for path, _, _ in diff(runs[0].values, run.values)}
    return [
        (path, [value_text(run.values[path]) if path in run.values else "not set" for run in runs]) for path in paths
    ]


def _read_samples(path: epath.Path) -> Iterator[dict[str, Any]]:
    for line in read_records(path):
        if not isinstance(line.get("prompt"), str) or not isinstance(line.get("text"), str):
            raise DataError(f"{path} has a line without a sample: {str(line)[:100]}.", "Restore or delete that line.")
        yield line


def _check_accounts(goodput: dict[str, Any]) -> None:
    """Raises TypeError, KeyError and the like if a value of `goodput.json` is missing or of another type."""
    shares = [seconds / goodput["wall_seconds"] for seconds in goodput["seconds"].values()]
    sum([goodput["goodput"], goodput["wall_seconds"], len(goodput["starts"]), *shares], 0.0)


def _read_object(path: epath.Path, check: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """The JSON object in a file; `{}` if there is no file.

    Raises:
      DataError: It is not a JSON object, or `check` fails on it.
    """
    if not path.exists():
        return {}
    try:
        check(content := read_json(path))
    except (DataError, ArithmeticError, AttributeError, KeyError, TypeError):
        raise DataError(f"{path} is damaged.", "Move it away: the report does without it.") from None
    return content
