"""What the package uses of vLLM, by name: a version that lacks one fails here, and says which."""

import dataclasses
import importlib
import inspect

import pytest
from vllm.config.compilation import CompilationConfig
from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from vllm.transformers_utils import config, configs
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from fla_longhorn_serving import vllm_plugin as vllm
from fla_longhorn_serving.vllm.mixer import LonghornMixer
from packages.serving.tests.names import imported

# what is read of the metadata of a batch, and handed to the convolution
METADATA = (
    'num_decode_tokens', 'num_prefill_tokens', 'num_accepted_tokens', 'state_indices_tensor_d', 'state_indices_tensor_p',
    'query_start_loc_d', 'query_start_loc_p', 'has_initial_states_p',
)
BATCH = ('query_start_loc', 'query_start_loc_cpu', 'seq_lens', 'block_table_tensor', 'is_prefilling')
CONVOLUTION = {
    causal_conv1d_fn: ('conv_states', 'has_initial_state', 'cache_indices', 'query_start_loc', 'activation'),
    causal_conv1d_update: ('conv_state', 'activation', 'conv_state_indices'),
}


@pytest.mark.parametrize(('module', 'name'), imported('vllm'), ids=str)
def test_imported(module, name):
    assert hasattr(importlib.import_module(module), name)


def test_tables():
    vllm.register()
    assert configs._CLASS_TO_MODULE['LonghornConfig'] == 'fla_longhorn_serving.vllm.config'
    assert config._CONFIG_REGISTRY['longhorn']


@pytest.mark.parametrize('name', METADATA)
def test_metadata(name):
    backend = MambaAttentionBackendEnum[LonghornMixer.mamba_type.name].get_class()
    assert name in {field.name for field in dataclasses.fields(backend.get_builder_cls().metadata_cls)}


@pytest.mark.parametrize('name', BATCH)
def test_batch(name):
    assert name in {field.name for field in dataclasses.fields(CommonAttentionMetadata)}


@pytest.mark.parametrize('op', CONVOLUTION, ids=lambda op: op.__name__)
def test_convolution(op):
    assert set(CONVOLUTION[op]) <= set(inspect.signature(op).parameters)


def test_the_compiler_does_not_look_into_the_op():
    assert 'vllm::mamba_mixer' in CompilationConfig._attention_ops
