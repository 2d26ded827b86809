"""What the plugin uses of SGLang, by name: a version that lacks one fails here, and says which."""

import dataclasses
import importlib
import inspect
import os

import pytest
from sglang.srt.configs import linear_attn_model_registry, model_config
from sglang.srt.layers.attention.mamba.mamba2_metadata import ForwardMetadata
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool, MambaPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.models.registry import ModelRegistry
from sglang.srt.utils.hf_transformers import common
from sglang.srt.utils.hf_transformers_utils import get_config

from fla_longhorn_serving import sglang_plugin as sglang
from packages.serving.tests.names import imported
from tests import forks


@pytest.mark.parametrize(('module', 'name'), imported('sglang'), ids=str)
def test_imported(module, name):
    """A name, or a module."""
    found = importlib.import_module(module)
    assert hasattr(found, name) or importlib.import_module(f'{module}.{name}')


def test_tables(variant):
    """SGLang finds the config, the model and its backend, and takes it for one without attention layers."""
    from fla_longhorn_serving.sglang.config import ServedConfig
    from fla_longhorn_serving.sglang.model import LonghornForCausalLM

    for _ in range(2):
        sglang.register()
    assert isinstance(get_config(str(variant('paper').folder), trust_remote_code=False), ServedConfig)
    assert common._CONFIG_REGISTRY['longhorn'] is ServedConfig
    assert ModelRegistry.resolve_model_cls(['LonghornForCausalLM'])[0] is LonghornForCausalLM
    assert model_config.PURE_SSM_ARCHITECTURES.count('LonghornForCausalLM') == 1
    spec = linear_attn_model_registry.get_linear_attn_spec_by_arch('LonghornForCausalLM')
    assert inspect.isclass(linear_attn_model_registry.import_backend_class(spec.backend_class_name))


PARTS = '''
import os
from fla_longhorn_serving import sglang_plugin as sglang
sglang.register()
from fla_longhorn.patches import apply
print(*apply._applied, os.environ.get('FLA_LONGHORN_PATCH'))
'''


@pytest.mark.parametrize(('chosen', 'applied'), [('', 'names cpu '), ('names', 'names names')])
def test_parts(chosen, applied):
    """A process of SGLang gets the parts of the patches that a served model needs, or those that the environment names."""
    env = {'FLA_LONGHORN_PATCH': chosen, 'PYTHONPATH': os.environ['PYTHONPATH']}
    assert forks.output('-c', PARTS, fla=False, env=env).splitlines()[-1] == applied


def test_metadata():
    assert {'mamba_cache_indices', 'query_start_loc'} <= {field.name for field in dataclasses.fields(ForwardMetadata)}
    assert hasattr(ForwardMode, 'is_decode')


def test_pool():
    """Where a request's states are."""
    assert hasattr(HybridReqToTokenPool, 'mamba2_layer_cache')
    assert {'conv', 'temporal'} <= {field.name for field in dataclasses.fields(MambaPool.State)}
