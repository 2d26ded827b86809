"""A saved checkpoint loads with `trust_remote_code=True` in a program that never imports the package."""

import json
import os
import subprocess
import sys

SAVE = '''
import torch
from fla_longhorn import LonghornConfig, LonghornForCausalLM
from fla_longhorn.models.longhorn.remote_code import register_for_auto_class
torch.manual_seed(0)
model = LonghornForCausalLM(LonghornConfig(hidden_size=16, num_hidden_layers=1, vocab_size=11, state_size=2)).eval()
model.save_pretrained('plain')
register_for_auto_class()
model.save_pretrained('checkpoint')
torch.save(model(torch.arange(11)[None]).logits, 'logits.pt')
'''
LOAD = '''
import sys
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
try:
    AutoConfig.from_pretrained('plain', trust_remote_code=True)
except ValueError as error:
    print('plain', 'longhorn' in str(error))
assert 'fla_longhorn' not in sys.modules
model = AutoModelForCausalLM.from_pretrained('checkpoint', trust_remote_code=True).eval()
print(type(model).__module__)
print(torch.equal(model(torch.arange(11)[None]).logits, torch.load('logits.pt')))
print(type(AutoModel.from_pretrained('checkpoint', trust_remote_code=True)).__name__)
model.save_pretrained('again')
'''
# refused unless it is allowed
REFUSED = '''
from transformers import AutoModelForCausalLM
try:
    AutoModelForCausalLM.from_pretrained('again', trust_remote_code=False)
except ValueError as error:
    print('trust_remote_code=True' in str(error))
model = AutoModelForCausalLM.from_pretrained('again', trust_remote_code=True)
print(type(model).__name__)
'''


def python(code: str, folder) -> list[str]:
    done = subprocess.run(
        [sys.executable, '-c', code], cwd=folder, capture_output=True, text=True,
        env={**os.environ, 'HF_HOME': str(folder / 'hf'), 'HF_HUB_OFFLINE': '1'},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_checkpoint_with_code(tmp_path):
    python(SAVE, tmp_path)
    assert not (tmp_path / 'plain' / 'longhorn.py').exists()
    assert 'auto_map' not in json.loads((tmp_path / 'plain' / 'config.json').read_text())
    assert python(LOAD, tmp_path) == ['plain True', 'fla_longhorn.models.longhorn.modeling_longhorn', 'True', 'LonghornModel']
    for name in ('config.json', 'longhorn.py'):
        assert (tmp_path / 'again' / name).read_text() == (tmp_path / 'checkpoint' / name).read_text()
    assert python(REFUSED, tmp_path) == ['True', 'LonghornForCausalLM']
