"""What prints as text is shown as text in notebooks."""

from __future__ import annotations

from typing import Any

__all__ = ["Shown"]


class Shown:
    """IPython shows an object by this method, where it would write a dictionary out."""

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))
