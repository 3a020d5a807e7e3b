from __future__ import annotations

import json
import resource

import pytest
import typer

from paxcli.cli.output import run
from paxcli.cli.plot import plot
from paxcli.metrics.writers import JsonlWriter

PNG = b"\x89PNG\r\n"


@pytest.fixture
def run_dirs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        writer = JsonlWriter(tmp_path / "runs" / name / "metrics.jsonl")
        for step in (10, 20, 30):
            writer.write(step, {"loss": 40 / step, "log_pplx": 30 / step, "mfu": None})
        writer.write(30, {"loss": 1.5, "log_pplx": 1.25}, "eval/held-out")
        writer.close()
    return ["runs/a", "runs/b"]


def _plot(*arguments):
    app = typer.Typer(rich_markup_mode=None)
    app.command()(plot)
    return run(app, arguments)


def test_one_run_gets_its_picture_in_the_run_directory(run_dirs, tmp_path, capsys):
    assert _plot("runs/a") == 0
    assert (tmp_path / "runs/a/loss.png").read_bytes().startswith(PNG)
    out, err = capsys.readouterr()
    assert "a: loss by step" in out and "a: log_pplx by step" in out
    assert out.endswith("Wrote runs/a/loss.png\n")
    assert "\x1b" not in out and err == ""


def test_a_full_disk_leaves_the_picture_before(run_dirs, tmp_path, capsys):
    assert _plot("runs/a") == 0
    before = {path: path.read_bytes() for path in (tmp_path / "runs/a").iterdir()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # no file may be larger
    try:
        assert _plot("runs/a", "--smoothing", "0.5") == 3
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "Cannot write runs/a/loss.png: a file exceeds the limit of its size" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in (tmp_path / "runs/a").iterdir()} == before


def test_an_axis_without_a_logarithm_and_a_metric_of_a_parameter(run_dirs, tmp_path, capsys):
    writer = JsonlWriter(tmp_path / "runs/a/metrics.jsonl")
    writer.write(1, {"grad_norm/stack/w": 0.0, "loss": 2.0})
    writer.close()
    for options in ((), ("--json",)):
        assert _plot("runs/a", "--metric", "grad_norm/stack/w", "--log", "y", *options) == 5
        assert "no place for 0, of run a" in "".join(capsys.readouterr())
    assert list(tmp_path.glob("**/*.png")) == []
    assert _plot("runs/a", "--metric", "grad_norm/stack/w") == 0
    assert (tmp_path / "runs/a/grad_norm.stack.w.png").exists()


def test_several_runs_share_a_picture_here(run_dirs, tmp_path, capsys):
    assert _plot(*run_dirs, "--metric", "log_pplx") == 0
    assert (tmp_path / "plot.png").read_bytes().startswith(PNG)
    out = capsys.readouterr().out
    assert "b eval/held-out, last 1.25" in out and "loss" not in out


def test_out_and_json(run_dirs, tmp_path, capsys):
    assert _plot("runs/a", "--metric", "loss", "--out", "pictures/x.png", "--json") == 0
    assert (tmp_path / "pictures/x.png").exists()
    assert json.loads(capsys.readouterr().out) == {
        "path": "pictures/x.png",
        "metrics": ["loss"],
        "runs": {
            "a": {
                "loss": {
                    "train": {"points": 3, "last_step": 30, "last": 40 / 30},
                    "eval/held-out": {"points": 1, "last_step": 30, "last": 1.5},
                }
            }
        },
    }


def test_dry_run_writes_nothing(run_dirs, tmp_path, capsys):
    assert _plot("runs/a", "--dry-run") == 0
    assert not (tmp_path / "runs/a/loss.png").exists()
    assert capsys.readouterr().out.endswith("Would write runs/a/loss.png\n")


def test_unknown_metric_names_the_nearest(run_dirs, capsys):
    assert _plot("runs/a", "--metric", "logpplx") == 2
    assert "`log_pplx`" in capsys.readouterr().err


def test_unusable_runs_are_named(run_dirs, tmp_path, capsys):
    assert _plot("runs/none", "--json") == 5
    error = json.loads(capsys.readouterr().out)["error"]
    assert "runs/none" in error["message"] and error["exit_code"] == 5
    assert _plot("runs/a", "--metric", "mfu") == 5
    assert "no values of `mfu`" in capsys.readouterr().err


def test_as_a_command(run_dirs, pax, tmp_path):
    done = pax("plot", "runs/a")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs/a/loss.png").exists()
