"""docs/vision.md runs as it stands."""

from __future__ import annotations

from tests.test_docs import execute_page


def test_blocks(tmp_path, device):
    execute_page('vision.md', tmp_path, device)
