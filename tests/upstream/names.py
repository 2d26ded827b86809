"""What fla-longhorn needs to find in fla and transformers, by module.

`python -m tests.upstream.names` tells what the installed versions lack, without importing the plugin.
"""

from __future__ import annotations

import importlib
import sys
from contextlib import suppress
from importlib.metadata import version
from types import ModuleType
from typing import Any

from torch import nn

NAMES = {
    'fla.backends': (
        'BaseBackend', 'BaseBackend.backend_type', 'BaseBackend.env_var', 'BaseBackend.priority',
        '_function_registries', 'register',
    ),
    'fla.layers': (),
    'fla.layers.attn': (
        'Attention', 'Attention.forward', 'Attention.k_proj', 'Attention.kv_dim', 'Attention.layer_idx',
        'Attention.num_kv_heads', 'Attention.window_size', 'flash_attn_func',
    ),
    'fla.layers.bitattn': (),
    'fla.layers.mla': (),
    'fla.layers.rodimus': (
        'SlidingWindowSharedKeyAttention', 'SlidingWindowSharedKeyAttention.forward', 'flash_attn_func',
    ),
    'fla.layers.utils': ('get_layer_cache', 'repad_hidden_states', 'unpad_hidden_states', 'update_layer_cache'),
    'fla.models': (),
    'fla.models.cache_utils': (
        'FLACache', 'FLACache.from_legacy_cache', 'FLALayer', 'FLALayer._seen_tokens', 'FLALayer._validate_crop',
        'FLALayer.crop', 'FLALayer.reset', 'FLALayer.state', 'FLALayer.update', 'LegacyFLACache',
    ),
    'fla.models.configuration_utils': ('get_attention_spec', 'parse_attention_config', 'validate_loss_config'),
    'fla.models.generation_utils': (
        'FLAGenerationMixin', 'FLAGenerationMixin._prepare_cache_for_generation',
        'FLAGenerationMixin.init_continuous_batching',
    ),
    'fla.models.modeling_utils': (
        'FLAForCausalLM', 'FLAForCausalLM.forward', 'FLAModel', 'FLAModel.forward', 'FLAPreTrainedModel',
        'FLAPreTrainedModel.__init__', 'FLAPreTrainedModel._compute_logits_and_loss',
        'FLAPreTrainedModel._init_weights', 'FLAPreTrainedModel._is_stateful', 'FLAPreTrainedModel._no_split_modules',
        'FLAPreTrainedModel._tied_weights_keys', 'FLAPreTrainedModel.base_model_prefix', 'FLAPreTrainedModel.config',
        'FLAPreTrainedModel.config_class', 'FLAPreTrainedModel.post_init',
        'FLAPreTrainedModel.supports_gradient_checkpointing',
    ),
    'fla.models.utils': (
        'Cache', 'Cache._transform_states', 'Cache.crop', 'Cache.get_seq_length', 'Cache.layers', 'Cache.update',
    ),
    'fla.modules': (
        'FusedCrossEntropyLoss', 'FusedLinearCrossEntropyLoss', 'L2Norm', 'L2Norm.eps', 'L2Norm.forward',
        'L2Norm.output_dtype', 'RMSNorm', 'RMSNorm.bias', 'RMSNorm.eps', 'RMSNorm.forward', 'RMSNorm.weight',
        'ShortConvolution', 'ShortConvolution.activation', 'ShortConvolution.backend', 'ShortConvolution.bias',
        'ShortConvolution.forward', 'ShortConvolution.weight',
    ),
    'fla.modules.activations.ops': (
        'elu_p1_bwd', 'elu_p1_fwd', 'logsigmoid_bwd', 'logsigmoid_fwd', 'powglu', 'powglu_fwd', 'powglu_fwdbwd',
        'powglu_linear', 'sigmoid_bwd', 'sigmoid_fwd', 'sqrelu_bwd', 'sqrelu_fwd', 'swiglu', 'swiglu_fwd',
        'swiglu_fwdbwd', 'swiglu_linear', 'swish_bwd', 'swish_fwd',
    ),
    'fla.modules.causal_conv1d.ops': (
        'causal_conv1d_bwd', 'causal_conv1d_fwd', 'causal_conv1d_update', 'causal_conv1d_update_states',
    ),
    'fla.modules.fused_cross_entropy.ops': (
        'FusedCrossEntropyLoss', 'FusedCrossEntropyLoss.forward', 'FusedCrossEntropyLoss.ignore_index',
        'FusedCrossEntropyLoss.inplace_backward', 'FusedCrossEntropyLoss.label_smoothing',
        'FusedCrossEntropyLoss.logit_scale', 'FusedCrossEntropyLoss.logit_softcapping',
        'FusedCrossEntropyLoss.lse_square_scale', 'FusedCrossEntropyLoss.process_group',
        'FusedCrossEntropyLoss.reduction', 'FusedCrossEntropyLoss.return_z_loss', 'cross_entropy_bwd',
        'cross_entropy_fwd', 'cross_entropy_loss',
    ),
    'fla.modules.fused_kl_div.ops': ('fused_kl_div_bwd', 'fused_kl_div_fwd'),
    'fla.modules.fused_linear_cross_entropy.ops': ('fused_linear_cross_entropy_bwd', 'logsumexp_fwd'),
    'fla.modules.mlp': (
        'GatedMLP', 'GatedMLP.down_proj', 'GatedMLP.forward', 'GatedMLP.fuse_swiglu', 'GatedMLP.gate_proj',
        'GatedMLP.hidden_act', 'GatedMLP.powglu_power', 'GatedMLP.swiglu_linear', 'GatedMLP.up_proj', 'SwiGLULinear',
        'SwiGLULinear.forward',
    ),
    'fla.modules.norm.fused_norm_gate': ('layer_norm_gated_bwd', 'layer_norm_gated_fwd'),
    'fla.modules.norm.l2norm': ('l2norm_bwd', 'l2norm_fwd'),
    'fla.modules.norm.layernorm': ('layer_norm_bwd', 'layer_norm_fwd'),
    'fla.modules.rotary.ops': ('rotary_embedding_fwdbwd',),
    'fla.modules.token_shift': ('token_shift_bwd', 'token_shift_fwd'),
    'fla.ops': (),
    'fla.ops.cp': (
        'FLACPContext', 'FLACPContext.cu_seqlens', 'FLACPContext.cu_seqlens_cpu', 'FLACPContext.group',
        'FLACPContext.layout', 'FLACPContext.post_num_ranks', 'FLACPContext.pre_num_conv_tokens',
        'FLACPContext.pre_num_ranks',
    ),
    'fla.ops.delta_rule': ('chunk_delta_rule',),
    'fla.ops.deltaformer.parallel': (),
    'fla.ops.gla': ('chunk_gla',),
    'fla.ops.nsa.naive': (),
    'fla.ops.nsa.parallel': (),
    'fla.utils': ('custom_device_ctx', 'get_multiprocessor_count'),
    'transformers': (
        'AutoConfig', 'AutoConfig.register', 'AutoModel', 'AutoModel._model_mapping',
        'AutoModel._model_mapping._extra_content', 'AutoModel.register', 'AutoModelForCausalLM',
        'AutoModelForCausalLM._model_mapping', 'AutoModelForCausalLM._model_mapping._extra_content',
        'AutoModelForCausalLM.register', 'AutoTokenizer', 'AutoTokenizer.from_pretrained', 'PreTrainedConfig',
    ),
    'transformers.cache_utils': ('Cache',),
    'transformers.configuration_utils': ('PreTrainedConfig', 'PreTrainedConfig.model_type'),
    'transformers.generation': ('GenerationMixin', 'GenerationMixin._prepare_cache_for_generation'),
    'transformers.integrations.tensor_parallel': ('ALL_PARALLEL_STYLES',),
    'transformers.modeling_layers': ('GradientCheckpointingLayer',),
    'transformers.modeling_outputs': ('BaseModelOutputWithPast', 'CausalLMOutputWithPast'),
    'transformers.models.auto.configuration_auto': ('CONFIG_MAPPING', 'CONFIG_MAPPING._extra_content'),
    'transformers.trainer': (),
    'transformers.trainer_pt_utils': ('get_parameter_names',),
}


def load(path: str) -> Any:
    """What is at a dotted path: a module or what one holds; None for what a class gives its instances.

    Raises:
        AttributeError, ImportError: there is nothing.
    """
    owner, _, name = path.rpartition('.')
    if not owner:
        return importlib.import_module(name)
    found = load(owner)
    if isinstance(found, ModuleType) and not hasattr(found, name):
        with suppress(ModuleNotFoundError):
            return importlib.import_module(path)
    if isinstance(found, type) and not hasattr(found, name) and has(found, name):
        return None
    return getattr(found, name)


def has(owner: type, name: str) -> bool:
    """Whether a class has an attribute, or its instances get it when they are built; not where every module has it."""
    if hasattr(owner, name):
        return not hasattr(nn.Module, name) or getattr(owner, name) is not getattr(nn.Module, name)
    own = [vars(base) for base in owner.__mro__ if base not in nn.Module.__mro__]
    set_by_init = (getattr(names.get('__init__'), '__wrapped__', names.get('__init__')) for names in own)
    return any(name in names.get('__annotations__', ()) for names in own) or any(
        name in init.__code__.co_names for init in set_by_init if hasattr(init, '__code__')
    )


def paths() -> list[str]:
    return [path for module, names in NAMES.items() for path in (module, *(f'{module}.{name}' for name in names))]


def missing() -> list[str]:
    """What is gone, a line for each."""
    lines = []
    for path in paths():
        try:
            load(path)
        except (AttributeError, ImportError) as error:
            lines.append(f'{path} is gone: {error}')
    return lines


if __name__ == '__main__':
    lines = missing()
    versions = ', '.join(f'{name} {version(name)}' for name in ('flash-linear-attention', 'transformers'))
    print('\n'.join(lines) or f'all {len(paths())} names are there', f'({versions})')
    sys.exit(bool(lines))
