"""PEFT's LoRA on every projection of the mixer."""

import pytest

from tests.integration.process import SCRIPTS, run


@pytest.mark.slow
def test_lora(tmp_path, device):
    out = run('-m', 'fla_longhorn', SCRIPTS / 'train_lora.py', tmp_path, device, cwd=tmp_path)
    first, last = map(float, out.split()[-2:])
    assert last < 0.95 * first
    assert {path.name for path in (tmp_path / 'adapter').iterdir()} >= {'adapter_config.json', 'adapter_model.safetensors'}
