"""The README's code runs as it stands, in one interpreter from top to bottom."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_code(default_device):
    blocks = re.findall(r'^```python\n(.*?)^```', (ROOT / 'README.md').read_text(), re.M | re.S)
    assert len(blocks) >= 4
    namespace = {}
    for block in blocks:
        exec(compile(block, 'README.md', 'exec'), namespace)


def test_links():
    """What it links to in the repository is there."""
    for target in re.findall(r'\]\((?!https?://)([^)#]+)\)', (ROOT / 'README.md').read_text()):
        assert (ROOT / target).exists(), target
