"""What the site reads of docstrings: sections without blank lines between them, and our own.

Google's style asks for a blank line above each section, and knows no Traffic, Oracle or Source.
"""

import re
from typing import Any

import griffe

STANDARD = "Args|Attributes|Raises|Returns|Yields"
OURS = "Deterministic|Layout|Oracle|Ranks|Source|Streams|Traffic|Wire"


class Sections(griffe.Extension):
    """Put a blank line above each section, and names of our own sections in bold."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of one object before it is parsed."""
        if obj.docstring is not None:
            text = re.sub(rf"\n+((?:{STANDARD}|{OURS}):)", r"\n\n\1", obj.docstring.value)
            obj.docstring.value = re.sub(rf"(?m)^({OURS}):", r"**\1:**", text)
