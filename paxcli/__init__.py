"""pax: configure, launch, run and measure large-model training on JAX.

    import paxcli as pax

    run = pax.train(pax.load("tiny", set={"num_train_steps": 20}), run_dir="runs/first")
    print(run.metrics()["loss"][-1], run.generate("def ")[0].text)

The names in `__all__` are the public API; everything else in the package may change without notice. Importing this
package is cheap: JAX is loaded when a function or class is first used.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from paxcli.errors import ConfigError, DataError, DivergedError, MissingError, PaxError, RemoteError, Stopped

if TYPE_CHECKING:
    from paxcli.api import Generation, Recipe, Run, compile, export_weights, import_weights, inspect_input, load, train

__version__ = "0.1.0"

__all__ = ["ConfigError", "DataError", "DivergedError", "MissingError", "PaxError", "RemoteError", "Stopped"]
__all__ += ["Generation", "Recipe", "Run"]
__all__ += ["compile", "export_weights", "import_weights", "inspect_input", "load", "train"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'paxcli' has no attribute {name!r}")
    if "jax" not in sys.modules:
        from paxcli.jax_defaults import configure_jax

        configure_jax()
    return getattr(importlib.import_module("paxcli.api"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
