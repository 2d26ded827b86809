"""docs/vision.md runs as it stands, and its table and settings are right."""

from __future__ import annotations

import json

import pytest
import timm
from timm.data import create_transform
from timm.data.auto_augment import rand_augment_transform
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2

import fla_longhorn.contrib.timm  # noqa: F401  registers
from tests.test_docs import DOCS, ROOT, execute_page


def test_blocks(tmp_path, device):
    execute_page('vision.md', tmp_path, device)


@pytest.mark.parametrize('size', ['tiny', 'small', 'base'])
def test_table(size):
    name = f'vision_longhorn_{size}_patch16_224'
    model = timm.create_model(name, device='meta')
    count = sum(x.numel() for x in model.parameters())
    assert f'| `{name}` | {count:,} | {model.embed_dim} | {len(model.blocks)} |' in (DOCS / 'vision.md').read_text()


@pytest.mark.parametrize('size', ['tiny', 'small'])
def test_settings(size):
    """What timm makes of the settings is the paper's training: Vision Mamba's."""
    settings = json.loads((ROOT / f'experiments/settings/vision_{size}.json').read_text())
    model = timm.create_model(settings['model'], drop_path_rate=settings['drop_path'], img_size=32)
    optimizer = create_optimizer_v2(
        model, settings['opt'], lr=settings['lr'], weight_decay=settings['weight_decay'], eps=settings['opt_eps'],
    )
    decays = {group['weight_decay']: len(group['params']) for group in optimizer.param_groups}
    # spared: a block's norm, D and two biases; patch bias, head bias, last norm, class token and positions
    assert decays[0.] == 24 * 4 + 5 and set(decays) == {0., {'tiny': 0.1, 'small': 0.05}[size]}
    scheduler, epochs = create_scheduler_v2(
        optimizer, settings['sched'], num_epochs=settings['epochs'], warmup_epochs=settings['warmup_epochs'],
        warmup_lr=settings['warmup_lr'], min_lr=settings['min_lr'], cooldown_epochs=settings['cooldown_epochs'],
    )
    rates = [scheduler._get_lr(epoch)[0] for epoch in (0, 5, 300)]
    assert epochs == 310 and rates[0] == 1e-6 and rates[1] == pytest.approx(1e-3, rel=1e-2) and rates[2] == 1e-5
    assert rand_augment_transform(settings['aa'], {}) and create_transform(224, is_training=True, auto_augment=settings['aa'])
    assert settings['batch_size'] * 8 == {'tiny': 1024, 'small': 512}[size]
