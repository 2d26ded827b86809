"""A checkpoint that timm saves, in transformers."""

import json

import timm
import torch
from PIL import Image
from timm.models import save_for_hf
from transformers import AutoImageProcessor, AutoModelForImageClassification, pipeline

from packages.extras.tests.timm.models import TINY, gates, images, small

ARGUMENTS = dict(img_size=32, patch_size=8, embed_dim=32, depth=2)


@gates
def test_timm_to_transformers(gate, tmp_path, device):
    torch.manual_seed(0)
    model = timm.create_model(TINY, num_classes=3, gate=gate, **ARGUMENTS).to(device).eval()
    save_for_hf(model, tmp_path)
    # timm 1.0.31 writes the number of classes twice, and transformers 5.23 passes both on, whatever the model
    config = json.loads((tmp_path / 'config.json').read_text())
    assert config['model_args'].pop('num_classes') == config['num_classes'] == 3
    (tmp_path / 'config.json').write_text(json.dumps(config))
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path).to(device).eval()
    x = torch.randn(2, 3, 32, 32, device=device)
    torch.testing.assert_close(loaded(x).logits, model(x), rtol=0, atol=0)
    assert [y.shape for y in loaded(x, output_hidden_states=True).hidden_states] == [(2, 32, 4, 4)] * 2

    processor = AutoImageProcessor.from_pretrained(tmp_path)
    assert processor(Image.new('RGB', (40, 50)))['pixel_values'].shape == (1, 3, 32, 32)
    classify = pipeline('image-classification', model=loaded, image_processor=processor, device=device)
    assert len(classify(Image.new('RGB', (40, 50)))) == 3


@gates
def test_symbolic_trace(gate, device):
    """The graph serves other batches, and has the parameters of the model to train."""
    model = small(device, drop_path_rate=0.1, gate=gate)
    traced = torch.fx.symbolic_trace(model)
    for n in (1, 2, 5):
        x = images(device, n)
        torch.testing.assert_close(traced(x), model(x))
    traced(x).square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
