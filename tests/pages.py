"""The code in the pages of docs/."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / 'docs'


def blocks(path: Path, language: str) -> list[str]:
    """The code in a language, in order."""
    found = re.findall(r'^```(\w*)\n(.*?)^```', path.read_text(), re.M | re.S)
    assert {name for name, _ in found} <= {'python', 'bash', 'sh', 'json', 'math', 'bibtex'}
    return [code for name, code in found if name == language]
