"""A saved checkpoint loads with `trust_remote_code=True` in a program that never imports the package, and names the package
where it is not installed."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from fla_longhorn import LonghornConfig
from fla_longhorn.attn_mode import FAMILIES
from fla_longhorn.models.remote_code import write_code
from tests import forks

SIZES = dict(hidden_size=16, num_hidden_layers=1, vocab_size=11)
CONFIGS = {
    'longhorn': lambda: LonghornConfig(state_size=2, **SIZES),
    'gla': lambda: CONFIG_MAPPING['gla'](attn_mode='longhorn', num_heads=2, **SIZES),
}
LOAD = '''
import sys
import torch
from transformers import AutoModel, AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained('checkpoint', trust_remote_code=True).to(sys.argv[1]).eval()
print(type(model).__name__)
print(torch.equal(model(torch.arange(11, device=model.device)[None]).logits, torch.load('logits.pt')))
print(type(AutoModel.from_pretrained('checkpoint', trust_remote_code=True)).__name__)
model.save_pretrained('again')
'''
# a machine without the package, or without fla
MISSING = '''
import sys
sys.modules[{module!r}] = None
from transformers import AutoConfig, AutoModelForCausalLM
for cls in (AutoConfig, AutoModelForCausalLM):
    try:
        cls.from_pretrained('checkpoint', trust_remote_code=True)
    except ImportError as error:
        print('pip install fla-longhorn' in str(error))
'''


def save(name, folder, device):
    model = AutoModelForCausalLM.from_config(CONFIGS[name]()).to(device).eval()
    model.save_pretrained(folder / 'checkpoint')
    torch.save(model(torch.arange(11, device=device)[None]).logits.detach(), folder / 'logits.pt')
    return model


@pytest.mark.slow
@pytest.mark.parametrize('name', ['longhorn', 'gla'])
def test_without_the_plugin(name, tmp_path, device):
    model = save(name, tmp_path, device)
    printed = forks.output('-c', LOAD, device, cwd=tmp_path, fla=False)
    assert printed.split() == [type(model).__name__, 'True', type(model.model).__name__]
    assert {x.name for x in (tmp_path / 'again').iterdir()} == {x.name for x in (tmp_path / 'checkpoint').iterdir()}
    for file in ('config.json', 'longhorn.py'):
        assert (tmp_path / 'again' / file).read_text() == (tmp_path / 'checkpoint' / file).read_text()


@pytest.mark.parametrize('module', ['fla_longhorn', 'fla'])
@pytest.mark.parametrize('name', CONFIGS)
def test_where_a_package_is_missing(name, module, tmp_path, device):
    save(name, tmp_path, device)
    assert forks.output('-c', MISSING.format(module=module), cwd=tmp_path, fla=False).split() == ['True', 'True']


@pytest.mark.parametrize('model_type', ['longhorn', *FAMILIES])
def test_the_file_imports_the_classes(model_type, tmp_path):
    config = CONFIG_MAPPING[model_type]()
    write_code(config, tmp_path)
    names = {}
    exec((tmp_path / 'longhorn.py').read_text(), names)
    heads = {'AutoModelForSequenceClassification', 'AutoModelForTokenClassification'} if model_type == 'longhorn' else set()
    assert config.auto_map.keys() == {'AutoConfig', 'AutoModel', 'AutoModelForCausalLM', *heads}
    for reference in config.auto_map.values():
        module, _, name = reference.partition('.')
        assert module == 'longhorn' and isinstance(names[name], type)
    assert names[config.auto_map['AutoConfig'].partition('.')[2]] is type(config)


def test_another_mixer_needs_no_file(tmp_path):
    config = CONFIGS['gla']()
    config.save_pretrained(tmp_path / 'swapped')
    config.attn_mode = 'chunk'
    config.save_pretrained(tmp_path / 'native')
    assert 'auto_map' in json.loads((tmp_path / 'swapped' / 'config.json').read_text())
    assert 'auto_map' not in json.loads((tmp_path / 'native' / 'config.json').read_text())
    assert not (tmp_path / 'native' / 'longhorn.py').exists()
