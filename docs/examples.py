"""Docstrings have one `Example:`; the reader of the API page shows code under `Examples:`."""

from typing import Any

import griffe


class Examples(griffe.Extension):
    """Gives the section its other name before docstrings are parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called with each module, class, function and attribute."""
        if obj.docstring:
            obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
