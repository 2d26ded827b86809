"""Configuration of Longhorn language models."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any, cast

from fla.models.configuration_utils import get_attention_spec, parse_attention_config, validate_loss_config
from transformers import GenerationConfig
from transformers.configuration_utils import PreTrainedConfig

from fla_longhorn.layers import Longhorn
from fla_longhorn.layers.options import check_integer, check_number, check_options, misspelt

# options of the layer that the config has under the same name
MIXER_OPTIONS = tuple(name for name in inspect.signature(Longhorn).parameters if name not in ('mode', 'layer_idx'))
# transformers' base class takes these
SHARED = ('pad_token_id', 'bos_token_id', 'eos_token_id', 'tie_word_embeddings')
# older files have these too
OF_GENERATION = frozenset(vars(GenerationConfig()))
# what the operators and the pages call an option
OTHER_NAMES = {'K': 'state_size'}
# names that transformers has for types of layers
LINEAR, FULL, SLIDING = 'linear_attention', 'full_attention', 'sliding_attention'


def refuse_misspelt(config: str, names: Iterable[str], options: Iterable[str]) -> None:
    """transformers would keep the value under its name, and the option its default."""
    others = [name for name in names if not hasattr(PreTrainedConfig, name) and name not in OF_GENERATION]
    near = misspelt(others, (x for x in options if x not in SHARED), 0.7)
    for name, option in (near | {x: y for x, y in OTHER_NAMES.items() if x in others}).items():
        raise TypeError(f'{config} got an unexpected keyword argument {name!r}: did you mean {option!r}?')


class LonghornConfig(PreTrainedConfig):
    """Configuration of a Longhorn model; the defaults are the paper's 120M model (arXiv 2407.14207, Table 1).

    Args:
        attn_mode (str, Optional):
            Op for more than 64 tokens, `chunk` or `fused_recurrent`. Default: `'chunk'`.
        hidden_size, num_hidden_layers, vocab_size (int, Optional):
            Size of the model. Default: 768, 24, 50304.
        state_size, expand, num_heads, conv_size, conv_bias, beta_rank, use_bias, exact, scalar_beta, k_norm, tie_qk, \
        value_proj, recompute, allow_neg_eigval, gate (Optional):
            Options of the mixer, :class:`fla_longhorn.layers.Longhorn`.
        attn (dict or list of dict, Optional):
            Layers of fla's attention instead of Longhorn: `{'layers': [3], 'num_heads': 12}`, also with `num_kv_heads`,
            `qkv_bias`, `window_size` and `rope_theta`. Default: `None`, the paper's model.
        layer_types (list of str, Optional):
            Type of each layer, as in transformers' hybrid models: `'linear_attention'` is Longhorn, `'full_attention'` fla's
            attention, `'sliding_attention'` the same with a `window_size`. They select the layers of an `attn` without
            `layers`, and otherwise must agree with it. Not saved in `config.json`. Default: `None`, from `attn`.
        hidden_ratio, intermediate_size, hidden_act (Optional):
            fla's gated MLP after each mixer. `hidden_ratio=None`, the default and the paper's model, has none.
        norm_eps (float, Optional):
            Epsilon of the RMS norms. Default: 1e-5.
        initializer_range (float, Optional):
            Standard deviation of the embeddings' initialisation. Default: 0.02.
        fuse_norm, fuse_swiglu, fuse_cross_entropy, fuse_linear_cross_entropy, use_l2warp (bool, Optional):
            fla's fused modules.

    Other keys are kept, as in transformers' configs. One that is nearly an option raises `TypeError`: `exakt`, `state_dim`.
    """

    model_type = 'longhorn'
    # the cache, by transformers' names before and from 5.24
    keys_to_ignore_at_inference = ['past_key_values', 'cache']
    # transformers' default, with fla's name for the embeddings
    base_model_fsdp_plan = {'embeddings': 'free_full_weight', 'layers.*': 'free_full_weight', 'norm': 'keep_full_weight'}

    def __init_subclass__(cls, *args: Any, **kwargs: Any) -> None:
        # transformers gives a subclass without this method one of its own, which sets no defaults
        if '__init__' not in vars(cls):
            cast(Any, cls).__init__ = super(cls, cls).__init__
        super().__init_subclass__(*args, **kwargs)

    def __init__(
        self,
        attn_mode: str = 'chunk',
        hidden_size: int = 768,
        state_size: int = 16,
        expand: float = 2,
        num_heads: int = 1,
        conv_size: int = 4,
        conv_bias: bool = True,
        beta_rank: int | str = 'auto',
        use_bias: bool = False,
        exact: bool = False,
        scalar_beta: bool = False,
        k_norm: str | None = None,
        tie_qk: bool = False,
        value_proj: bool = False,
        recompute: bool = True,
        attn: dict | list[dict] | None = None,
        hidden_ratio: int | None = None,
        intermediate_size: int | None = None,
        hidden_act: str = 'swish',
        num_hidden_layers: int = 24,
        max_position_embeddings: int = 2048,
        norm_eps: float = 1e-5,
        use_cache: bool = True,
        pad_token_id: int | None = None,
        bos_token_id: int | None = 1,
        eos_token_id: int | None = 2,
        tie_word_embeddings: bool = True,
        initializer_range: float = 0.02,
        fuse_norm: bool = True,
        fuse_swiglu: bool = True,
        fuse_cross_entropy: bool = True,
        fuse_linear_cross_entropy: bool = False,
        use_l2warp: bool = False,
        vocab_size: int = 50304,
        layer_types: list[str] | None = None,
        allow_neg_eigval: bool = False,
        gate: str | None = None,
        **kwargs,
    ):
        arguments = {name: x for name, x in locals().items() if name not in ('self', 'kwargs', '__class__')}
        refuse_misspelt(type(self).__name__, kwargs, arguments)
        check_options(mode=attn_mode, **{name: arguments[name] for name in MIXER_OPTIONS})
        for name, size in (('num_hidden_layers', num_hidden_layers), ('vocab_size', vocab_size)):
            check_integer(name, size)
        if hidden_ratio is not None:
            check_number('hidden_ratio', hidden_ratio)
        if intermediate_size is not None:
            check_integer('intermediate_size', intermediate_size)
        validate_loss_config(fuse_cross_entropy=fuse_cross_entropy, fuse_linear_cross_entropy=fuse_linear_cross_entropy)
        if not isinstance(layer_types, (list, tuple, type(None))):
            raise TypeError(f'layer_types must be a list of str, got {layer_types!r}')
        if layer_types is not None and isinstance(attn, dict) and 'layers' not in attn:
            attn = {**attn, 'layers': [i for i, kind in enumerate(layer_types) if kind != LINEAR]}
        arguments['attn'] = parse_attention_config(attn, num_hidden_layers=num_hidden_layers)
        shared = {name: arguments.pop(name) for name in SHARED}
        del arguments['layer_types']
        for name, x in arguments.items():
            setattr(self, name, x)
        if layer_types is not None:
            self.layer_types = layer_types
        super().__init__(**shared, **kwargs)

    @property
    def has_mlp(self) -> bool:
        return self.hidden_ratio is not None or self.intermediate_size is not None

    @property
    def layer_types(self) -> list[str]:
        """transformers' types of the layers, from `attn`."""
        return [LINEAR if spec is None else FULL if spec.get('window_size') is None else SLIDING for spec in self._attention]

    @layer_types.setter
    def layer_types(self, kinds: Sequence[str]) -> None:
        if list(kinds) != self.layer_types:
            raise ValueError(f'layer_types must be those that attn = {self.attn} gives, {self.layer_types}, got {kinds}')

    @property
    def sliding_window(self) -> int | None:
        """The largest window of the attention layers, which transformers' caches ask for; `None` if no layer has one."""
        return max((spec['window_size'] for spec in self._attention if spec and spec.get('window_size')), default=None)

    @property
    def _attention(self) -> list[dict[str, Any] | None]:
        """The options of each layer's attention, `None` for Longhorn."""
        return [get_attention_spec(self.attn, layer_idx=i) for i in range(self.num_hidden_layers)]
