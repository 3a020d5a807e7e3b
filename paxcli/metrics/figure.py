"""A matplotlib figure that a notebook shows without pyplot."""

from __future__ import annotations

import io

from matplotlib.figure import Figure


class NotebookFigure(Figure):
    """A figure that Jupyter displays as an image, also where `matplotlib.pyplot` was never imported."""

    def _repr_png_(self) -> bytes:
        image = io.BytesIO()
        self.savefig(image, format="png")
        return image.getvalue()
