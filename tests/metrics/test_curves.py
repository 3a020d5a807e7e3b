from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from paxcli.errors import ConfigError, DataError, MissingError
from paxcli.metrics.curves import check_metric, draw, metric_names, plot_text, read_runs, save_figure, series
from paxcli.metrics.writers import JsonlWriter

BLUE, ORANGE = (0x1F, 0x77, 0xB4), (0xFF, 0x7F, 0x0E)


@pytest.fixture
def run_dirs(tmp_path):
    for seed, name in enumerate(("first", "second")):
        writer = JsonlWriter(tmp_path / name / "metrics.jsonl")
        for step in range(10, 210, 10):
            writer.write(step, {"loss": 3 + 50 / (step + seed), "log_pplx": 3.0, "mfu": None})
            if step % 50 == 0:
                writer.write(step, {"loss": 4.0 + seed}, "eval/held-out")
        writer.close()
    return [tmp_path / "first", tmp_path / "second"]


def _pixels_near(path, color):
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("RGB")).astype(int)
    return int(np.sum(np.abs(pixels - color).sum(axis=-1) < 60))


def test_series_are_the_logged_values_by_split(run_dirs):
    train, held_out = series(read_runs(run_dirs)[1], "loss")
    assert (train.split, held_out.split) == ("train", "eval/held-out")
    assert train.steps == list(range(10, 210, 10))
    assert train.values == [3 + 50 / (step + 1) for step in train.steps]
    assert held_out[1:] == ([50, 100, 150, 200], [5.0] * 4)


def test_a_step_logged_twice_counts_once(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        "".join(
            json.dumps({"step": step, "split": "train", "loss": loss}) + "\n" for step, loss in [(2, 1), (1, 5), (2, 3)]
        )
        + '{"step": 3, "spl'
    )
    assert series(read_runs([tmp_path])[0], "loss") == [("train", [1, 2], [5, 3])]


def test_runs_are_named_after_their_directory(run_dirs, tmp_path):
    assert [run.name for run in read_runs(run_dirs)] == ["first", "second"]
    twin = tmp_path / "other" / "first"
    twin.mkdir(parents=True)
    (twin / "metrics.jsonl").write_text('{"step": 1, "split": "train", "loss": 1.0}\n')
    assert [run.name for run in read_runs([run_dirs[0], twin])] == [str(run_dirs[0]), str(twin)]


def test_missing_and_empty_runs_are_data_errors(tmp_path):
    with pytest.raises(DataError, match="metrics.jsonl") as error:
        read_runs([tmp_path / "nowhere"])
    assert "pax train" in error.value.hint
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(DataError, match="no metrics yet"):
        read_runs([tmp_path])


def test_metric_must_be_there(run_dirs):
    runs = read_runs(run_dirs)
    assert metric_names(runs) == ["loss", "log_pplx", "mfu"]
    check_metric(runs, "loss")
    with pytest.raises(ConfigError) as error:
        check_metric(runs, "log_plx")
    assert "`log_pplx`" in error.value.hint
    with pytest.raises(ConfigError) as error:
        check_metric(runs, "zzz")
    assert "loss, log_pplx, mfu" in error.value.hint
    with pytest.raises(DataError, match="first has no values of `mfu`"):
        check_metric(runs, "mfu")


def test_picture_shows_every_run(run_dirs, tmp_path):
    one, two = tmp_path / "one.png", tmp_path / "sub" / "two.png"
    runs = read_runs(run_dirs)
    save_figure(draw(runs[:1], ["loss"]), one)
    save_figure(draw(runs, ["loss", "log_pplx"]), two)
    assert _pixels_near(one, BLUE) > 300 and _pixels_near(one, ORANGE) == 0
    assert _pixels_near(two, BLUE) > 300 and _pixels_near(two, ORANGE) > 300
    with Image.open(one) as narrow, Image.open(two) as wide:
        assert wide.width > 1.5 * narrow.width  # two panels


def test_picture_needs_a_known_kind_and_a_place(run_dirs, tmp_path):
    runs = read_runs(run_dirs)
    with pytest.raises(ConfigError, match="cannot be written as an image") as error:
        save_figure(draw(runs, ["loss"]), tmp_path / "loss.txt")
    assert "png" in error.value.hint
    with pytest.raises(MissingError, match="Cannot write"):
        save_figure(draw(runs, ["loss"]), run_dirs[0] / "metrics.jsonl" / "loss.png")


def test_picture_needs_no_display_and_no_home(run_dirs, tmp_path):
    script = (
        "import sys; from paxcli.metrics.curves import draw, read_runs, save_figure\n"
        "save_figure(draw(read_runs(sys.argv[1:2]), ['loss']), sys.argv[2])"
    )
    keep = {name: value for name, value in os.environ.items() if name in ("PATH", "PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [sys.executable, "-c", script, run_dirs[0], tmp_path / "bare.png"],
        env=keep | {"HOME": "/proc/nowhere", "MPLBACKEND": "TkAgg", "DISPLAY": ":99"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    assert _pixels_near(tmp_path / "bare.png", BLUE) > 300


def test_text_falls_from_left_to_right_without_control_codes(run_dirs):
    text = plot_text(read_runs(run_dirs[:1]), "loss", width=72, height=18)
    lines = text.splitlines()
    assert "\x1b" not in text
    assert len(lines) == 18 and max(map(len, lines)) == 72
    assert "first: loss" in lines[0]
    assert "train, last 3.25" in text and "eval/held-out, last 4" in text
    first_mark = [line.find(next((c for c in line if "⠀" < c <= "⣿"), "\0")) for line in lines]
    columns = [column for column in first_mark if column >= 0]
    assert columns[0] < columns[-1]  # high at the left, low at the right


def test_text_tells_runs_apart_without_color(run_dirs):
    text = plot_text(read_runs(run_dirs), "loss")
    assert "+ second train" in text and "second eval/held-out, last 5" in text
    assert "\x1b[" in plot_text(read_runs(run_dirs), "loss", color=True)


def test_text_of_a_single_point(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "split": "train", "loss": 2.5}\n')
    assert "last 2.5" in plot_text(read_runs([tmp_path]), "loss")
