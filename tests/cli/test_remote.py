"""`--on NAME`: what is sent to the workers of a fake cloud, and what is refused before."""

from __future__ import annotations

import json

from tests.cloud.test_jobs import prepare


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
