"""Finds the user's own code among the loaded modules: what is neither pax's, nor Python's, nor an installed package's.

Such code may do anything, such as reading a file while it is traced.
"""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
import types
from pathlib import Path

import jax

from paxcli.config.index import package_directories

INSTALLED = str(Path(jax.__file__).parents[1])  # the time of this directory changes when a package is installed
_PLACES = ("stdlib", "platstdlib", "purelib", "platlib", "scripts")  # the last has the command `pax`
_USER_SCRIPTS = sysconfig.get_path("scripts", sysconfig.get_preferred_scheme("user"))  # of `pip install --user`


def module_files() -> dict[str, str]:
    """Name → file of each loaded module; for a `__main__` that was typed in, as in a notebook, the null device."""
    modules = {name: vars(one) for name, one in list(sys.modules.items()) if isinstance(one, types.ModuleType)}
    files = {name: facts["__file__"] for name, facts in modules.items() if facts.get("__file__")}
    main = files.get("__main__", os.devnull)
    return files | {"__main__": os.path.realpath(main) if os.path.islink(main) else main}


def find_own_code() -> dict[str, str]:
    """Name → checksum of the source code, for each loaded module of the user's, `__main__` included."""
    places = sysconfig.get_paths()
    roots = *map(str, package_directories()), INSTALLED, _USER_SCRIPTS, *(places[name] for name in _PLACES)
    of_others = tuple(root + os.sep for root in roots)
    files = {name: Path(file) for name, file in module_files().items() if not file.startswith(of_others)}
    sources = {name: file.read_bytes() if file.is_file() else b"" for name, file in files.items()}
    return {name: hashlib.sha256(source).hexdigest()[:12] for name, source in sources.items()}
