"""The wrappers of methods of fla's models, blocks and modules that `fla_longhorn.patches` installs.

While a block with `attn_mode='longhorn'` is built, the constructors of its native mixer, of fla's attention and of fla's gated
MLP make Longhorn and our classes of the other two. Everything else is the family's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch.nn as nn
from fla.layers.attn import Attention
from fla.models.modeling_utils import FLAForCausalLM
from fla.modules import mlp

from fla_longhorn.attn_mode.config import MODE, is_swapped, mixer_options, prepare
from fla_longhorn.attn_mode.families import FAMILIES, Family
from fla_longhorn.attn_mode.mixer import LonghornMixer
from fla_longhorn.layers import Longhorn
from fla_longhorn.models import LonghornForCausalLM
from fla_longhorn.models.base import prepare_inputs_for_generation
from fla_longhorn.models.call import after_forward, before_forward
from fla_longhorn.models.causal_lm import with_shift_labels
from fla_longhorn.modules import GatedMLP
from fla_longhorn.modules.attention import RowwiseAttention, attention_options
from fla_longhorn.modules.cache import CACHE

# the Trainer's question whether a model's loss is divided by `num_items_in_batch`
ACCEPTS = 'accepts_loss_kwargs'
# while a block is built: what the constructors of fla's classes make instead
_becomes: ContextVar[dict[Any, Callable]] = ContextVar('becomes', default={})  # noqa: B039  never changed


def wrap_model_init(init: Callable) -> Callable:
    """Let `__init__` of fla's models prepare the config before anything is built from it."""
    def __init__(self, config, *args, **kwargs):
        if is_swapped(config):
            prepare(config)
        init(self, config, *args, **kwargs)
        longhorn = is_swapped(config) or config.model_type == MODE
        if longhorn and not isinstance(self, FLAForCausalLM) and not hasattr(self, ACCEPTS):
            # a head around the base model, whose loss is a mean unless it says so
            setattr(self, ACCEPTS, False)
        if is_swapped(config):
            # assisted generation can revert its states
            self._is_stateful = False
            if isinstance(self, FLAForCausalLM):
                self._get_name = listed_name
            elif isinstance(self, FAMILIES[config.model_type].find_model()):
                self.register_forward_pre_hook(before_forward, with_kwargs=True)
                self.register_forward_hook(after_forward, with_kwargs=True)

    return __init__


def wrap_block_init(init: Callable, family: Family) -> Callable:
    """Let `__init__` of a family's block replace the native mixer if the config says so."""
    def __init__(self, config, *args, **kwargs):
        if not is_swapped(config):
            init(self, config, *args, **kwargs)
            return
        # a block can be built without a model
        prepare(config)
        token = _becomes.set({
            family.find_native(): partial(become_mixer, config=config, family=family),
            Attention: partial(become, cls=RowwiseAttention),
            mlp.GatedMLP: partial(become, cls=GatedMLP),
        })
        try:
            init(self, config, *args, **kwargs)
        finally:
            _becomes.reset(token)
        if not any(isinstance(module, (Longhorn, RowwiseAttention)) for module in self.children()):
            raise ValueError(f'attn_mode={MODE!r} does not work in {type(config).__name__}: {family.unknown}')
        for change in family.after_build:
            change(self)

    return __init__


def wrap_module_init(init: Callable) -> Callable:
    """Let `__init__` of a class of fla make another module while a block with Longhorn is built."""
    def __init__(self, *args, **kwargs):
        _becomes.get().get(type(self), init)(self, *args, **kwargs)

    return __init__


def become(module: nn.Module, /, *args: Any, cls: type[nn.Module], **kwargs: Any) -> None:
    """Initialise `module`, before its own constructor has run, as a `cls`."""
    module.__class__ = cls
    cls.__init__(module, *args, **kwargs)


def become_mixer(module: nn.Module, /, *, config: Any, family: Family, layer_idx: int, **kwargs: Any) -> None:
    """Longhorn with the options of a prepared config, or attention if `config.attn` has this layer.

    Families with hybrid layers build their attention themselves; the others get it here.
    """
    attention = attention_options(config, layer_idx)
    if attention is not None:
        become(module, cls=RowwiseAttention, **attention)
        return
    sizes = {'hidden_size': config.hidden_size, 'norm_eps': config.norm_eps, 'layer_idx': layer_idx}
    become(module, cls=LonghornMixer, **sizes, **mixer_options(config))


def listed_name() -> str:
    """The Trainer shifts labels for `label_smoothing_factor` by class name, and does not know fla's."""
    return LonghornForCausalLM.__name__


def wrap_forward(forward: Callable, shared: Callable) -> Callable:
    """A method that calls `shared` instead of `forward` if the mixer is Longhorn."""
    def run(self, *args, **kwargs):
        return (shared if is_swapped(self.config) else forward)(self, *args, **kwargs)

    return run


def wrap_prepare_inputs(method: Callable) -> Callable:
    """`prepare_inputs_for_generation` of Longhorn's models if the mixer is Longhorn."""
    run: Any = wrap_forward(method, prepare_inputs_for_generation)
    # `generate` takes the names of arguments from there
    *named, rest = inspect.signature(method).parameters.values()
    name = inspect.Parameter(CACHE, inspect.Parameter.KEYWORD_ONLY, default=None)
    run.__signature__ = inspect.Signature([*named, *([] if CACHE in {x.name for x in named} else [name]), rest])
    return run


def wrap_causal_lm(forward: Callable) -> Callable:
    """Let `forward` of a causal language model accept `shift_labels` if the mixer is Longhorn."""
    return wrap_forward(forward, partial(with_shift_labels, forward))
