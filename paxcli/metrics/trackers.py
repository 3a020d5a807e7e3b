"""Sends metrics to experiment trackers: Weights & Biases and MLflow."""

from __future__ import annotations

import functools
import importlib.util
import os
import queue
import threading
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

from etils import epath

from paxcli.config.paths import replace_text, resolve_path
from paxcli.errors import MissingError, Stopped, first_line
from paxcli.log import log
from paxcli.metrics.writers import TRAIN, MetricValues, is_finite

Tracker = Literal["wandb", "mlflow"]

_CLOSE_SECONDS = 60


class Client(NamedTuple):
    """A tracker's run.

    Attributes:
      id: Lets a resumed run continue it.
      log: Takes the step and the metrics.
      close: Ends the run in one of `states`.
      states: The tracker's states of a run that is `finished`, was `stopped` by a signal, or `failed`.
    """

    id: str
    log: Callable[[int, dict[str, float]], object]
    close: Callable[[Any], object]
    states: dict[str, Any]


def _open_wandb(name: str, recipe: dict[str, Any], run_id: str | None) -> Client:
    """A run of Weights & Biases, in the project and mode that its own environment variables name."""
    import wandb

    # Its lines would mix with the progress, and a question for a login would wait for ever.
    settings = wandb.Settings(console="off", silent=True, login_timeout=5)
    project = os.environ.get("WANDB_PROJECT", "pax")
    run = wandb.init(project=project, name=name, id=run_id, resume="allow", config=recipe, settings=settings)
    # Steps of its own would have to increase, and those after a resume do not.
    run.define_metric("*", step_metric="step")
    states = {"finished": 0, "stopped": 255, "failed": 1}  # exit codes; 255 is wandb's own after Ctrl-C
    return Client(run.id, lambda step, values: run.log({"step": step, **values}), run.finish, states)


def _open_mlflow(name: str, recipe: dict[str, Any], run_id: str | None) -> Client:
    """A run of MLflow, in the experiment and on the server that its own environment variables name."""
    import mlflow

    mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", "pax"))
    run = mlflow.start_run(run_id=run_id, run_name=name)
    if run_id is None:
        mlflow.log_params(recipe)
    states = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
    return Client(run.info.run_id, lambda step, values: mlflow.log_metrics(values, step), mlflow.end_run, states)


_OPEN = {"wandb": _open_wandb, "mlflow": _open_mlflow}


def check_installed(trackers: Iterable[str]) -> None:
    """Raises MissingError for a tracker whose package is not installed."""
    for name in trackers:
        if importlib.util.find_spec(name) is None:
            raise MissingError(f"`writers` has {name}, which is not installed.", f"Install it: `pip install {name}`.")


class TrackerWriter:
    """Sends metrics to a tracker from a thread of its own. A failure is logged; it neither stops nor delays a run.

    Args:
      name: The tracker.
      run_dir: The run directory. The tracker's run has its name, and `<tracker>-run-id.txt` identifies it.
      recipe: Path → plain value.
      resume_step: The step that the run resumes from; 0 in a new run.
    """

    def __init__(self, name: str, run_dir: epath.Path, recipe: dict[str, Any], resume_step: int):
        self._name, self._run_dir, self._recipe, self._resumes = name, run_dir, recipe, resume_step > 0
        self._queue: queue.SimpleQueue[tuple[int, dict[str, Any]] | str] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._send, name=name, daemon=True)
        self._thread.start()

    def write(self, step: int, values: MetricValues, split: str = TRAIN) -> None:
        """Queues the values that are finite, named `split/metric`."""
        self._queue.put((step, {f"{split}/{name}": value for name, value in values.items() if is_finite(value)}))

    def close(self, kind: type[BaseException] | None = None, error: BaseException | None = None, /, *_: object) -> None:
        """Waits until the tracker has everything, or a minute. `error`: what ended the run; None = it is finished."""
        stopped = isinstance(error, Stopped | KeyboardInterrupt)
        self._queue.put("finished" if error is None else "stopped" if stopped else "failed")
        self._thread.join(_CLOSE_SECONDS)
        if self._thread.is_alive():
            log.warning("%s did not receive all metrics within %d s.", self._name, _CLOSE_SECONDS)

    def _send(self) -> None:
        warn_once = functools.cache(log.warning)
        try:
            path = self._run_dir / f"{self._name}-run-id.txt"
            run_id = _read_id(path) if self._resumes and path.exists() else None
            client = _OPEN[self._name](self._run_dir.name, self._recipe, run_id)
            replace_text(path, f"{client.id}\n{resolve_path(path)}\n")
            while isinstance(entry := self._queue.get(), tuple):
                try:
                    client.log(*entry)
                except Exception as error:  # each client raises its own types
                    warn_once("%s did not receive all metrics: %s", self._name, first_line(error))
            client.close(client.states[entry])
        except Exception as error:
            log.warning("%s failed: %s", self._name, first_line(error))


def _read_id(path: epath.Path) -> str | None:
    """The id of the tracker's run, from its file; None in a copy of a run directory whose original still exists."""
    run_id, *place = path.read_text().splitlines()
    original = resolve_path(place[0] if place else path)  # earlier versions wrote the id only
    is_copy = original != resolve_path(path) and original.exists() and run_id in original.read_text().splitlines()
    return None if is_copy else run_id
