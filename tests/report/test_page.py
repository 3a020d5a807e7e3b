from __future__ import annotations

import errno
import json
import math
import os

import pytest

import paxcli as pax
from paxcli.cli.main import app
from paxcli.cli.output import run
from paxcli.errors import DataError, MissingError
from paxcli.metrics.writers import JsonlWriter
from paxcli.report.content import differing_values, read_reported_runs
from paxcli.training.run_dir import RunDir
from tests.report.pages import Page, open_in_browser

HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>"


def _lines(path):
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def runs(tmp_path):
    """Two runs' directories, as training writes them, with a step logged twice and values that are missing."""
    for number, name in enumerate(("first", "second")):
        path = tmp_path / name
        writer = JsonlWriter(path / "metrics.jsonl")
        for step in (10, 20, 20, 30):
            loss = math.nan if step == 30 and number else 3 + 50 / (step + number)
            writer.write(step, {"loss": loss, "log_pplx": loss, "learning_rate": 1e-3, "mfu": None, "layer_1": 0.5})
        writer.write(30, {"loss": 4.25 + number, "num_examples": 12_345}, "eval/held-out")
        writer.close()
        lines = {"task.train.num_train_steps": 40, "task.train.learner.learning_rate": 1e-3 * (number + 1)}
        RunDir(path).describe(pax.load("tiny").config, "recipe: tiny\n")
        (path / "config.txt").write_text("".join(f"{key} = {json.dumps(lines[key])}\n" for key in sorted(lines)))
        causes = ("step", "input_wait", "start_up", "compile", "restore", "eval", "save", "lost", "stopped")
        seconds = dict.fromkeys(causes, 0.0) | {"step": 75.0, "eval": 25.0}
        accounts = {"goodput": 0.75, "wall_seconds": 100.0, "seconds": seconds, "starts": [{}]}
        (path / "goodput.json").write_text(json.dumps(accounts))
    samples = [{"step": step, "prompt": "def ", "text": HOSTILE} for step in (10, 20)]
    (tmp_path / "second" / "samples.jsonl").write_text("".join(json.dumps(one) + "\n" for one in samples))
    return tmp_path / "first", tmp_path / "second"


@pytest.fixture
def page(runs, tmp_path):
    pax.Run(runs[0]).report(runs[1], path=tmp_path / "pages" / "report.html")
    return tmp_path / "pages" / "report.html"


def test_the_page_holds_the_logged_values(runs, page):
    first, second = Page(page.read_text()).data["runs"]
    for found, path in ((first, runs[0]), (second, runs[1])):
        logged = {(line["split"], line["step"]): line for line in _lines(path)}
        assert {(split, step) for split, columns in found["splits"].items() for step in columns["step"]} == set(logged)
        for split, columns in found["splits"].items():
            for index, step in enumerate(columns["step"]):
                for metric in columns.keys() - {"step"}:
                    assert columns[metric][index] == logged[split, step].get(metric), (split, step, metric)
    assert second["splits"]["train"]["loss"][-1] is None


def test_charts_are_those_metrics_that_have_values(page):
    found = Page(page.read_text())
    assert found.data["groups"] == {
        "Quality": ["loss"],  # log_pplx is the same
        "Optimization": ["learning_rate"],
        "Speed": [],
        "Other": ["layer_1", "num_examples"],
    }
    assert page.read_text().count('class="chart"') == 2


def test_tables_have_differences_times_evaluations_and_samples(page):
    texts = [text.strip() for text in Page(page.read_text()).texts]
    for wanted in ("task.train.learner.learning_rate", "0.002", "75.0%", "25.0%", "12,345", "30 of 40", HOSTILE):
        assert wanted in texts, wanted
    assert texts.count("task.train.num_train_steps") == 0


def test_the_summary_has_no_earlier_loss_of_a_run_that_diverged(runs, tmp_path):
    facts = pax.Run(runs[1]).report(path=tmp_path / "x.html")["runs"]["second"]
    assert facts["step"] == 30 and math.isnan(facts["loss"]) and facts["mfu"] is None
    assert Page((tmp_path / "x.html").read_text()).texts.count("not finite") == 2  # and the log perplexity


def test_bytes_of_the_command_that_are_not_utf_8_are_shown(runs, tmp_path):
    (runs[0] / "environment.json").write_text(json.dumps({"command": ["pax", "\udcff"]}))
    pax.Run(runs[0]).report(path=tmp_path / "x.html")
    assert "pax \\udcff" in (tmp_path / "x.html").read_text()


def test_nothing_is_loaded_from_elsewhere(page):
    found = Page(page.read_text())
    assert all(link.startswith("#") for link in found.links), found.links
    assert "Plotly" in found.scripts[None] or any("Plotly" in text for text in found.scripts.values())
    assert "img" not in found.tags


def test_a_page_that_cannot_be_written_leaves_the_one_before(runs, page, monkeypatch):
    before = page.read_text()

    def fill_disk(number):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fill_disk)
    with pytest.raises(MissingError, match="no space left"):
        pax.Run(runs[0]).report(path=page)
    assert page.read_text() == before


def test_runs_with_only_metrics_are_reported(runs, tmp_path):
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "metrics.jsonl").write_text((runs[0] / "metrics.jsonl").read_text())
    result = pax.Run(alone).report(path=tmp_path / "alone.html")
    assert result["runs"]["alone"]["step"] == 30
    assert "The directory has no" in (tmp_path / "alone.html").read_text()


def test_a_long_run_is_thinned_and_keeps_its_end(tmp_path):
    lines = [json.dumps({"step": step, "split": "train", "loss": step}) for step in range(1, 10_002)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (run,) = read_reported_runs([str(tmp_path)])
    columns = run.curves()["train"]
    assert columns["step"] == columns["loss"] == [*range(1, 10_002, 3), 10_001]


def test_the_table_has_the_last_evaluations_of_a_long_run(tmp_path):
    lines = [json.dumps({"step": step, "split": "eval/x", "loss": step / 8}) for step in range(1, 5_002)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    pax.Run(tmp_path).report(path=tmp_path / "x.html")
    text = (tmp_path / "x.html").read_text()
    assert all(f'<td class="number">{step:,}</td>' in text for step in range(4_990, 5_002))
    assert "The last 12 of 5,001 evaluations" in text


def test_a_cause_without_seconds_is_left_out(runs, tmp_path):
    accounts = {"goodput": 0.5, "wall_seconds": 10.0, "seconds": {"step": 5.0}, "starts": [{}]}
    (runs[0] / "goodput.json").write_text(json.dumps(accounts))
    pax.Run(runs[0]).report(path=tmp_path / "x.html")
    assert "50.0%" in (tmp_path / "x.html").read_text()


def test_a_value_that_one_recipe_lacks_is_not_set(runs):
    with (runs[1] / "config.txt").open("a") as file:
        file.write("task.vn = null\n")
    assert ("task.vn", ["not set", "null"]) in differing_values(read_reported_runs([str(path) for path in runs]))


def test_damage_is_named(runs, tmp_path):
    rest = '"wall_seconds": 1, "seconds": {"step": 1}, "starts": []}'
    numbers = [f'{{"goodput": 1, {rest.replace("1", number)}' for number in ("[]", "0", "x", f"1{'0' * 400}")]
    of_step = f'{{"goodput": 1, {rest.replace(": 1}", ": [1]}")}'
    for text in ('{"goodput": 1}', *numbers, of_step, f'{{"goodput": null, {rest}', "[" * 100_000):
        (runs[0] / "goodput.json").write_text(text)
        with pytest.raises(DataError, match=r"goodput\.json is damaged"):
            pax.Run(runs[0]).report(path=tmp_path / "x.html")
    (tmp_path / "file").write_text("")
    with pytest.raises(MissingError, match="Cannot write"):
        pax.Run(runs[1]).report(path=tmp_path / "file" / "x.html")
    (runs[1] / "samples.jsonl").write_text('{"step": 1, "prompt": null, "text": "x"}\n')
    with pytest.raises(DataError, match=r"samples\.jsonl has a line without a sample"):
        read_reported_runs([runs[1]])
    (runs[1] / "samples.jsonl").unlink()
    (runs[1] / "recipe.yaml").write_bytes(b"recipe: \xff")
    with pytest.raises(DataError, match=r"recipe\.yaml is not UTF-8"):
        read_reported_runs([runs[1]])


def test_the_command_prints_what_it_wrote(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(app, ["report", "first", "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith("Would write first/report.html")
    assert list(tmp_path.glob("**/*.html")) == []
    assert run(app, ["report", "first", "second", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["path"], result["bytes"]) == ("report.html", (tmp_path / "report.html").stat().st_size)
    assert result["runs"]["first"]["loss"] == 3 + 50 / 30
    assert result["runs"]["second"]["loss"] is None  # not finite at its last step


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 500])
def test_the_browser_draws_all_charts_and_runs_no_foreign_script(page, tmp_path, width):
    dom, console = open_in_browser(page, tmp_path / "profile", width)
    assert console == []
    assert "<title>first, second</title>" in dom
    assert dom.count('class="main-svg"') >= 3
    assert "second eval/held-out" in dom
