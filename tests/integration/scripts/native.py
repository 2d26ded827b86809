"""What fla's own models compute on a device, as JSON: `native.py cpu|cuda [plugin]`, with the plugin imported or not.

Numbers are digests, so that a last bit shows. What fails, such as everything on a CPU without Triton's interpreter, gives the
type of the error.
"""

import hashlib
import json
import os
import sys
from functools import partial

import torch
from triton.runtime import autotuner

if os.environ.get('TRITON_INTERPRET') == '1':
    # nothing is measured there, so every kernel keeps one configuration
    build = autotuner.Autotuner.__init__
    autotuner.Autotuner.__init__ = lambda self, fn, names, configs, *args, **kwargs: build(
        self, fn, names, configs[:1], *args, **kwargs,
    )
if 'plugin' in sys.argv:
    import fla_longhorn  # noqa: F401

import fla.models  # noqa: F401  registers
from fla.layers import Attention
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

DEVICE = torch.device(sys.argv[1])
# fla's fused loss refuses tensors on a CPU
SIZES = dict(hidden_size=32, num_hidden_layers=1, num_heads=2, vocab_size=32, fuse_cross_entropy=False)


def digest(x: torch.Tensor) -> str:
    return hashlib.sha256(x.detach().cpu().contiguous().numpy().tobytes()).hexdigest()


def build(family: str, **options):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES | options)).to(DEVICE)


def initial(family: str) -> dict:
    """Keys and initial weights, of a family that is not run."""
    # RWKV7 divides by the number of layers but one
    model = build(family, num_hidden_layers=2, **({} if family == 'hgrn' else {'head_dim': 16}))
    return {name: digest(x) for name, x in model.state_dict().items()}


def train(family: str, **options) -> list:
    model = build(family, **options)
    loss = model(IDS, labels=IDS).loss
    loss.backward()
    return [digest(loss), {name: digest(p.grad) for name, p in model.named_parameters()}]


def generate(family: str) -> list:
    return build(family).eval().generate(IDS, max_new_tokens=3, do_sample=False, pad_token_id=0).tolist()


def smoothed() -> str:
    """The Trainer's own loss of label smoothing."""
    options = TrainingArguments('unused', label_smoothing_factor=0.2, report_to='none', use_cpu=DEVICE.type == 'cpu')
    trainer = Trainer(build('gla'), options, train_dataset=[])
    return digest(trainer.compute_loss(trainer.model, {'input_ids': IDS, 'labels': IDS}))


IDS = torch.randint(0, 32, (2, 12), generator=torch.Generator().manual_seed(0)).to(DEVICE)
CASES = {
    **{f'{what.__name__} {x}': partial(what, x) for what in (train, generate) for x in ('gla', 'delta_net')},
    'attention': lambda: [list(x.shape) for x in Attention(hidden_size=32, num_heads=2).parameters()],
    'hybrid': partial(train, 'gla', attn={'layers': [0], 'num_heads': 2}),
    'Transformer': partial(train, 'transformer'),
    'weight decay': lambda: sorted(Trainer.get_decay_parameter_names(None, build('gla'))),
    'label smoothing': smoothed,
    **{f'initial {x}': partial(initial, x) for x in ('gated_deltanet', 'linear_attn', 'hgrn', 'rwkv7')},
}
results = {}
for name, case in CASES.items():
    try:
        results[name] = case()
    except Exception as error:
        results[name] = f'{type(error).__name__}: {error}'
print(json.dumps(results))
