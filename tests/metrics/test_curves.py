from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from paxcli.errors import ConfigError, DataError, MissingError
from paxcli.metrics.curves import check_metric, draw, metric_names, read_runs, save_figure, series, smooth
from paxcli.metrics.writers import JsonlWriter
from paxcli.report.terminal import plot_text

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


def test_a_name_that_is_not_utf_8_is_shown(run_dirs, tmp_path):
    path = run_dirs[0].rename(tmp_path / os.fsdecode(b"caf\xe9"))
    (run,) = read_runs([path])
    assert run.name == r"caf\udce9"
    save_figure(draw([run], ["loss"]), tmp_path / "a.png")


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
    assert len(lines) == 18 + 1 and max(map(len, lines)) == 72  # and the names of the curves
    assert "first: loss" in lines[0]
    assert "train, last 3.25" in text and "eval/held-out, last 4" in text
    first_mark = [line.find(next((c for c in line if "⠀" < c <= "⣿"), "\0")) for line in lines[:18]]
    columns = [column for column in first_mark if column >= 0]
    assert columns[0] < columns[-1]  # high at the left, low at the right


def test_text_tells_runs_apart_without_color(run_dirs):
    text = plot_text(read_runs(run_dirs), "loss")
    assert "+ second train" in text and "second eval/held-out, last 5" in text
    assert "\x1b[" in plot_text(read_runs(run_dirs), "loss", color=True)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0123456, "0.01235"), (3.19312, "3.193"), (11_580.4, "11,580"), (6.65e8, "665,000,000"), (1.5e13, "1.5e+13")],
)
def test_values_have_no_exponent_where_digits_are_few(tmp_path, value, text):
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1, "split": "train", "tokens_per_second": {value}}}\n')
    shown = plot_text(read_runs([tmp_path]), "tokens_per_second")
    assert f"last {text}" in shown and f"{text}┤" in shown


def test_text_of_a_single_point(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "split": "train", "loss": 2.5}\n')
    assert "last 2.5" in plot_text(read_runs([tmp_path]), "loss")
    (line,) = draw(read_runs([tmp_path]), ["loss"]).axes[0].get_lines()
    assert line.get_marker() == "o"  # a line through one point is invisible


def test_a_loss_that_is_not_finite_is_a_gap_and_never_the_last_value(tmp_path):
    lines = [{"step": n, "split": "train", "loss": None if n in (3, 6) else 5 - n / 2} for n in range(1, 7)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    runs = read_runs([tmp_path])
    (curve,) = series(runs[0], "loss")
    gaps = [False, False, True, False, False, True]
    assert np.isnan(curve.values).tolist() == np.isnan(smooth(curve, 0.5).values).tolist() == gaps
    without = curve._replace(values=[value for value in curve.values if value == value])
    assert [value for value in smooth(curve, 0.5).values if value == value] == smooth(without, 0.5).values
    (line,) = draw(runs, ["loss"], log="y").axes[0].get_lines()
    assert np.isnan(line.get_ydata()).tolist() == gaps
    assert line.get_label() == "train, last not finite"
    text = plot_text(runs, "loss", width=61, height=20)
    assert text.splitlines()[-1].endswith("train, last not finite")
    middle = [row.split("│")[1][20:23] for row in text.splitlines() if row.count("│") == 2]
    assert not "".join(middle).strip()


@pytest.mark.parametrize("log", ["", "x"])
def test_steps_of_a_short_run_are_integers(log, tmp_path):
    lines = (json.dumps({"step": step, "split": "train", "loss": 5 - step}) for step in (1, 2, 3, 4))
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    runs = read_runs([tmp_path])
    assert plot_text(runs, "loss", log=log).splitlines()[-2].split() == ["1", "2", "3", "4"]
    ticks = draw(runs, ["loss"], log=log).axes[0].get_xticks()
    assert log or np.array_equal(ticks, np.round(ticks))


@pytest.mark.parametrize(("count", "length"), [(12, 3), (2, 80), (3, 120)])
def test_names_of_many_runs_or_long_ones_leave_room_for_the_curves(count, length, run_dirs, tmp_path):
    names = [f"{number:02}" + "_x" * (length // 2) for number in range(count)]
    for name in names:
        shutil.copytree(run_dirs[0], tmp_path / name)
    figure = draw(read_runs([tmp_path / name for name in names]), ["loss", "log_pplx"])
    figure.draw_without_rendering()
    edges = figure.bbox
    for panel in figure.axes:
        assert panel.get_window_extent().height > 0.8 * 150 * 2 and panel.get_window_extent().width > 150 * 4
        for box in (text.get_window_extent() for text in (*panel.get_legend().get_texts(), figure._suptitle)):
            assert edges.x0 <= box.x0 and box.x1 <= edges.x1 and edges.y0 <= box.y0 and box.y1 <= edges.y1


def test_smoothing_is_that_of_pandas_and_leaves_evaluations(run_dirs):
    train, held_out = series(read_runs(run_dirs)[0], "loss")
    weights = [[0.1 * 0.9 ** (n - i) if i <= n else 0.0 for i in range(len(train.steps))] for n in range(20)]
    expected = [np.average(train.values, weights=row) for row in weights]
    np.testing.assert_allclose(smooth(train, 0.9).values, expected, rtol=1e-12)
    assert smooth(held_out, 0.9) == held_out
    assert smooth(train, 0.0).values == train.values
    with pytest.raises(ConfigError, match="not from 0 to below 1"):
        smooth(train, 1.0)


def test_a_logarithmic_axis_spaces_powers_evenly(tmp_path):
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    for step in (1, 10, 100, 1000, 10000):
        writer.write(step, {"loss": 1 / step, "skipped_steps": 0})
    writer.close()
    runs = read_runs([tmp_path])
    # A power law is a straight line: as many rows down as columns to the right, everywhere.
    rows = plot_text(runs, "loss", width=80, height=22, log="xy").splitlines()[2:]
    marks = [min(found) for row in rows if "│" in row and (found := [i for i, c in enumerate(row) if "⠀" < c <= "⣿"])]
    steps = np.diff(marks)[1:]
    assert len(marks) > 12 and steps.max() - steps.min() <= 2
    axes = draw(runs, ["loss"], log="xy").axes[0]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    with pytest.raises(DataError, match="no place for 0"):
        check_metric(runs, "skipped_steps", "y")


def test_an_image_can_be_svg_with_the_smoothed_curve_before_the_values(run_dirs, tmp_path):
    save_figure(draw(read_runs(run_dirs), ["loss"], smoothing=0.9), tmp_path / "loss.svg")
    assert (tmp_path / "loss.svg").read_text().count("<svg") == 1
    faint, smooth, *_ = draw(read_runs(run_dirs[:1]), ["loss"], smoothing=0.9).axes[0].get_lines()
    assert (faint.get_alpha(), smooth.get_alpha()) == (0.25, 0.8)
    assert np.ptp(faint.get_ydata()) > np.ptp(smooth.get_ydata())


def test_the_names_of_curves_cover_no_curve(run_dirs):
    text = plot_text(read_runs(run_dirs), "loss", width=60, height=16)
    picture, _, legend = text.partition("└┬")
    assert "last" not in picture and legend.count("last") == 4
    assert max(map(len, text.splitlines())) <= 60
