"""Reads of arrays that end before their event loop does, also if some of them fail."""

from __future__ import annotations

import asyncio
from typing import Any

from orbax.checkpoint import type_handlers


class ArrayHandler(type_handlers.ArrayHandler):
    """Orbax's handler of `jax.Array`, which waits for the other reads when one fails.

    Orbax closes the loop at the first failure, and each read that ends later would print a stack trace.
    """

    async def deserialize(self, infos: Any, args: Any = None) -> Any:
        """Reads the arrays of `infos`."""
        earlier = asyncio.all_tasks()
        try:
            return await super().deserialize(infos, args)
        finally:
            await asyncio.gather(*(asyncio.all_tasks() - earlier), return_exceptions=True)
