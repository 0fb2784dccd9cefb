"""Prepares docstrings for the API page: doctests become code blocks, and comments after fields become descriptions.

griffe, which reads the code for mkdocstrings, calls these methods by their names.
"""

import re
from typing import Any

from griffe import Attribute, Docstring, Extension, Object

DOCTEST = re.compile(r"^>>> .*?(?=\n\n|\Z)", flags=re.DOTALL | re.MULTILINE)
COMMENT = re.compile(r"(?<!ignore)  # (?!type: )(?P<words>.+)$")


class Readable(Extension):
    """Changes what griffe has read, before mkdocstrings shows it."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """Put doctests into code blocks."""
        if obj.docstring is not None:
            obj.docstring.value = DOCTEST.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)

    def on_attribute(self, *, attr: Attribute, **kwargs: Any) -> None:
        """Use the comment after a field as its description, where the field has no docstring."""
        if attr.docstring is not None or not attr.lineno:
            return
        first_line = attr.source.split("\n")[0]
        comment = COMMENT.search(first_line)
        if comment:
            attr.docstring = Docstring(comment["words"], lineno=attr.lineno, parent=attr)
