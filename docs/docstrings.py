"""How docstrings become pages: doctests as code, and the comment behind a field as what it says.

griffe, which reads the code for mkdocstrings, calls these methods by their names.
"""

import re
from typing import Any

from griffe import Attribute, Docstring, Extension, Object

DOCTEST = re.compile(r"^>>> .*?(?=\n\n|\Z)", flags=re.DOTALL | re.MULTILINE)
COMMENT = re.compile(r"(?<!ignore)  # (?!type: )(?P<words>.+)$")


class Readable(Extension):
    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = DOCTEST.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)

    def on_attribute(self, *, attr: Attribute, **kwargs: Any) -> None:
        """The fields of a NamedTuple have their shapes, and what they are, in a comment."""
        found = COMMENT.search(attr.source.split("\n")[0]) if attr.docstring is None and attr.lineno else None
        if found:
            attr.docstring = Docstring(found["words"], lineno=attr.lineno, parent=attr)
