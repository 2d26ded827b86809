"""The configs are of the paper's models."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

CONFIGS = Path(__file__).parents[1] / 'configs'
SIZES = {'120M': 128_563_968, '350M': 369_968_128, '1.3B': 1_331_595_264}


@pytest.mark.parametrize('folder', [CONFIGS, CONFIGS / 'flame'], ids=['', 'flame'])
@pytest.mark.parametrize('name', list(SIZES))
def test_presets(name, folder):
    """The paper's sizes with tied embeddings; its Table 1 prints 128.6M and 369.8M, the authors' code has 369.97M."""
    path = folder / f'longhorn_{name}.json'
    config = AutoConfig.from_pretrained(path)
    # what README.md recommends, said in the file
    assert json.loads(path.read_text())['exact'] is config.exact is True
    assert set(json.loads(path.read_text())) - {'architectures', 'model_type'} <= set(config.to_dict())
    with torch.device('meta'):
        model = AutoModelForCausalLM.from_config(config)
    assert sum(x.numel() for x in model.parameters()) == SIZES[name]
