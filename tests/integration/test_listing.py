"""fla's way of listing its models, and flame's way of building one from a JSON file."""

import pytest

from tests.integration.process import ROOT, SCRIPTS, run


@pytest.mark.slow
def test_listed_and_built_by_flame(tmp_path, device):
    out = run(SCRIPTS / 'list_models.py', ROOT / 'configs' / 'flame', device, cwd=tmp_path)
    sizes = dict(line.split() for line in out.splitlines())
    assert sizes == {
        'longhorn_1.3B.json': '1331595264', 'longhorn_120M.json': '128563968', 'longhorn_350M.json': '369968128',
    }
