from fla.models.configuration_utils import AttentionConfig, AttentionConfigBase, validate_loss_config
from transformers.configuration_utils import PreTrainedConfig


class LonghornConfig(AttentionConfigBase, PreTrainedConfig):

    model_type = 'longhorn'
    keys_to_ignore_at_inference = ['past_key_values']

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
        exact: bool = True,
        allow_neg_eigval: bool = False,
        gate: str | None = None,
        attn: AttentionConfig = None,
        hidden_ratio: int | None = None,
        intermediate_size: int | None = None,
        hidden_act: str = 'swish',
        num_hidden_layers: int = 24,
        max_position_embeddings: int = 2048,
        norm_eps: float = 1e-5,
        use_cache: bool = True,
        pad_token_id: int | None = None,
        bos_token_id: int = 1,
        eos_token_id: int = 2,
        tie_word_embeddings: bool = True,
        initializer_range: float = 0.02,
        fuse_norm: bool = True,
        fuse_swiglu: bool = True,
        fuse_cross_entropy: bool = True,
        fuse_linear_cross_entropy: bool = False,
        use_l2warp: bool = False,
        vocab_size: int = 50304,
        **kwargs,
    ):
        self.attn_mode = attn_mode
        self.hidden_size = hidden_size
        self.state_size = state_size
        self.expand = expand
        self.num_heads = num_heads
        self.conv_size = conv_size
        self.conv_bias = conv_bias
        self.beta_rank = beta_rank
        self.use_bias = use_bias
        self.exact = exact
        self.allow_neg_eigval = allow_neg_eigval
        self.gate = gate
        # without either, the blocks have no MLP, as in the paper
        self.hidden_ratio = hidden_ratio
        self.intermediate_size = intermediate_size
        self.hidden_act = hidden_act
        self.num_hidden_layers = num_hidden_layers
        self.max_position_embeddings = max_position_embeddings
        self.attn = attn
        self.norm_eps = norm_eps
        self.use_cache = use_cache
        self.initializer_range = initializer_range

        self.fuse_norm = fuse_norm
        self.fuse_swiglu = fuse_swiglu
        self.fuse_cross_entropy = fuse_cross_entropy
        self.fuse_linear_cross_entropy = fuse_linear_cross_entropy
        self.use_l2warp = use_l2warp
        self.vocab_size = vocab_size

        validate_loss_config(fuse_cross_entropy=fuse_cross_entropy, fuse_linear_cross_entropy=fuse_linear_cross_entropy)

        super().__init__(
            pad_token_id=pad_token_id,
            bos_token_id=bos_token_id,
            eos_token_id=eos_token_id,
            tie_word_embeddings=tie_word_embeddings,
            **kwargs,
        )
