"""The entry point by which vLLM finds the models: it leaves names, and imports neither fla nor transformers."""

import json
import pkgutil
import tomllib

import pytest

from tests import forks

GROUP = 'vllm.general_plugins'
IMPORTS = '''
import sys, fla_longhorn_serving.vllm_plugin
print({'torch', 'transformers', 'fla', 'fla_longhorn', 'vllm'} & set(sys.modules))
import fla_longhorn
print([x for x in sys.modules if x.startswith(('vllm', 'fla_longhorn_serving.vllm.', 'fla_longhorn_serving.sglang.'))])
'''
CONFIGS = '''
import json, sys
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.transformers_utils.config import get_config
loaded = []
for folder in sys.argv[1:]:
    config = get_config(folder, trust_remote_code=True)
    from vllm.transformers_utils.model_arch_config_convertor import MODEL_ARCH_CONFIG_CONVERTORS
    found = MODEL_ARCH_CONFIG_CONVERTORS.get(config.model_type)
    loaded.append([type(config).__name__, found and found.__name__, 'fla' in sys.modules])
print(json.dumps(loaded))
'''


def test_inert():
    """What the entry point names can be imported without vLLM, and so can the package, which does not ask for it."""
    project = tomllib.loads((forks.ROOT / 'packages/serving/pyproject.toml').read_text())['project']
    entry_points = project['entry-points'][GROUP]
    assert entry_points == {'longhorn': 'fla_longhorn_serving.vllm_plugin:register'}
    done = forks.run('-c', IMPORTS, fla=False)
    assert done.stdout.split('\n')[:2] == ['set()', '[]'], done.stdout + done.stderr
    assert callable(pkgutil.resolve_name(entry_points['longhorn']))


def test_other_versions_of_vllm_start(tmp_path):
    """vLLM does not catch what an entry point raises."""
    (tmp_path / 'vllm').mkdir()
    (tmp_path / 'vllm/__init__.py').write_text('ModelRegistry = None')
    code = 'import sys; sys.path.insert(0, sys.argv[1]); from fla_longhorn_serving import vllm_plugin; vllm_plugin.register()'
    done = forks.run('-c', code, tmp_path, fla=False)
    assert done.returncode == 0 and 'UserWarning: fla-longhorn does not know this version of vLLM' in done.stderr, done.stderr


def python(code: str, *arguments: object) -> list:
    pytest.importorskip('vllm', reason='make test-serving has vLLM')
    return json.loads(forks.output('-c', code, *arguments, fla=False).split('\n')[-2])


def test_configs(tmp_path):
    """Another model's config imports nothing; Longhorn's is known without being imported; a swapped family is refused."""
    from fla.models import GLAConfig

    from fla_longhorn import LonghornConfig

    (tmp_path / 'llama').mkdir()
    (tmp_path / 'llama/config.json').write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    LonghornConfig(architectures=['LonghornForCausalLM']).save_pretrained(tmp_path / 'longhorn')
    GLAConfig(architectures=['GLAForCausalLM'], attn_mode='longhorn').save_pretrained(tmp_path / 'swapped')
    llama, longhorn, swapped = (tmp_path / name for name in ('llama', 'longhorn', 'swapped'))
    assert python(CONFIGS, llama, longhorn) == [
        ['LlamaConfig', None, False], ['LonghornConfig', 'LonghornConvertor', True],
    ]
    # fla's config is known where something has imported fla
    assert python('import fla_longhorn\n' + CONFIGS, swapped) == [['GLAConfig', 'SwappedConvertor', True]]
