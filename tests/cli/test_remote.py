"""`--on NAME`: what is sent to the workers of a fake cloud, and what is refused before."""

from __future__ import annotations

import json

import pytest

from tests.cli.test_import_weights import set_options
from tests.cloud.test_jobs import prepare
from tests.convert.huggingface.directories import write_directory


def test_a_recipe_is_sent_with_the_files_that_it_needs(cloud, pax, tmp_path):
    """A YAML recipe based on another one, with an overlay, based on Python with a module and a package beside it."""
    files = {
        "top/mine.yaml": "recipe: ../base.yaml\n",
        "base.yaml": "recipe: code/mine.py\noverlays: [short.yaml]\n",
        "short.yaml": "max_seq_len: 32\n",
        "code/mine.py": """
import sizes
from paxcli.config.recipe import recipe

@recipe()
def mine():
    from pax_recipes.tiny import tiny_synthetic
    from parts import batch
    config = tiny_synthetic()
    config.task.train.global_batch_size = batch.SIZE + sizes.MORE
    return config
""",
        "code/sizes.py": "MORE = 1\n",
        "code/parts/__init__.py": "",
        "code/parts/batch.py": "SIZE = 2\n",
        "code/unused.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    prepare(cloud)
    done = pax("inspect-input", "top/mine.yaml", "--on", "demo", "--json")
    assert done.returncode == 0, done.stderr
    (shown,) = json.loads(done.stdout)["inputs"]
    assert shown["fields"]["ids"]["shape"] == [3, 32]
    (sent,) = cloud.root.glob("workers/demo-w0/.pax/jobs/*/files")
    found = {str(path.relative_to(f"{sent}{tmp_path}")) for path in sent.rglob("*.*") if path.suffix != ".pyc"}
    assert found == files.keys() - {"code/unused.py"}


def test_weights_of_hugging_face_are_imported_on_one_worker_only(cloud, pax_here, tmp_path, monkeypatch):
    """Several would write the same checkpoint at the same time, and end with exit code 5."""
    started = []
    monkeypatch.setattr("paxcli.cloud.jobs.Job.start", lambda job, arguments, files: started.append(arguments))
    monkeypatch.setattr("paxcli.cli.remote.watch", lambda job: 0)
    target = prepare(cloud)
    for words in (["hf:org/model"], ["tiny", "--from", "hf:org/model"]):
        command = ("train", *words, "--run-dir", str(tmp_path / "run"), "--on", target.name)
        cloud.write(workers=1)
        assert pax_here(*command).returncode == 0
        cloud.write(workers=2)
        refused = pax_here(*command)
        assert refused.returncode == 2 and "2 workers would all import hf:org/model" in refused.stderr
        assert "`pax import org/model --out gs://BUCKET/RUN`" in refused.stderr
    assert started[0][-2:] == ["--", "hf:org/model"] and started[1][2] == "--from=hf:org/model" and len(started) == 2


@pytest.mark.slow
def test_one_worker_trains_from_weights_of_hugging_face(cloud, pax, tmp_path):
    prepare(cloud)
    weights, sets = write_directory(tmp_path / "model", "llama31"), set_options()
    done = pax("train", f"hf:{weights}", *sets, "--run-dir", str(tmp_path / "run"), "--on", "demo", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 2 and "Imported" in done.stderr


def test_consent_to_run_code_is_sent_along(cloud, pax_here, monkeypatch):
    started = []
    monkeypatch.setattr("paxcli.cloud.jobs.Job.start", lambda job, arguments, files: started.append(arguments))
    monkeypatch.setattr("paxcli.cli.remote.watch", lambda job: 0)
    target = prepare(cloud)
    for consent in (["--trust-code"], []):
        assert pax_here(*consent, "eval", "gs://bucket/run", "--on", target.name).returncode == 0
        assert started.pop() == [*consent, "eval", "--", "gs://bucket/run"]
