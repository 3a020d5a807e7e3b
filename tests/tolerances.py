"""How closely results must agree, once for each type. A test that needs more says why."""

from __future__ import annotations

FLOAT32 = dict(atol=2e-5, rtol=2e-5)
BFLOAT16 = dict(atol=2e-2, rtol=2e-2)
PARALLEL = 1e-5  # one device against several: relative, losses and the norm of each gradient
