"""Marks of tests that need Lingvo. Importing this module skips a test file if Lingvo cannot be loaded."""

from __future__ import annotations

import importlib.util

import pytest

if importlib.util.find_spec("lingvo") is None:
    pytest.skip("lingvo is not installed: pip install 'lingvo>=0.14'", allow_module_level=True)
try:
    import lingvo.core.ops  # noqa: F401, TID253
except Exception as error:
    pytest.skip(f"lingvo cannot be loaded: {error}", allow_module_level=True)

MARKS = [
    pytest.mark.lingvo,
    # Warnings of TensorFlow and Lingvo are theirs.
    *(
        pytest.mark.filterwarnings(f"default::{name}")
        for name in ("DeprecationWarning", "FutureWarning", "UserWarning")
    ),
]
