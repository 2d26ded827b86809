
import pytest
import torch

from fla_longhorn.modules.flash_attention import flash_attn_func, flash_attn_varlen_func
from tests import forks
from tests.reference import compare, tensor


def attend(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1)):
    """Softmax attention of `[B, T, HQ, K]`, `[B, S, H, K]` and `[B, S, H, V]`, one query and head at a time."""
    (B, T, HQ, K), (S, H) = q.shape, k.shape[1:3]
    scale = K ** -0.5 if softmax_scale is None else softmax_scale
    left, right = window_size[0], 0 if causal else window_size[1]
    outputs = []
    for t in range(T):
        position = t + S - T
        start = 0 if left < 0 else max(0, position - left)
        end = max(start, S if right < 0 else min(S, position + right + 1))
        for h in range(HQ):
            keys, values = (x[:, start:end, h // (HQ // H)] for x in (k, v))
            weights = (keys * q[:, t, None, h] * scale).sum(-1).softmax(-1)
            outputs.append((weights[..., None] * values).sum(1))
    return torch.stack(outputs, 1).view(B, T, HQ, -1)


def pack(function, q, k, v, bounds_q, bounds_k, **options):
    """`function` sequence by sequence."""
    ranges = zip(bounds_q, bounds_q[1:], bounds_k, bounds_k[1:], strict=False)
    return torch.cat([function(q[None, a:b], k[None, c:d], v[None, c:d], **options)[0] for a, b, c, d in ranges if b > a])


@pytest.mark.parametrize('heads', [(2, 2), (4, 2), (3, 1)])
@pytest.mark.parametrize(('T', 'S', 'options'), [
    (9, 9, {}),
    (9, 9, dict(causal=True)),
    (9, 9, dict(causal=True, window_size=(3, 0))),
    (9, 9, dict(causal=True, window_size=(0, 5))),
    (9, 9, dict(window_size=(2, 1))),
    (9, 9, dict(window_size=(-1, 2), softmax_scale=0.3)),
    (3, 9, dict(causal=True)),
    (3, 9, dict(causal=True, window_size=(4, 0))),
    (3, 9, {}),
    (1, 9, dict(causal=True)),
    (1, 9, dict(causal=True, window_size=(2, 0))),
])
def test_against_float64(heads, T, S, options):
    torch.manual_seed(0)
    HQ, H = heads
    inputs = dict(q=tensor(2, T, HQ, 16), k=tensor(2, S, H, 16), v=tensor(2, S, H, 8))
    compare(
        lambda **x: (flash_attn_func(**x, **options),), lambda **x: (attend(**x, **options),), inputs, torch.float32,
    )


@pytest.mark.parametrize('options', [dict(causal=True), dict(causal=True, window_size=(3, 0)), dict(window_size=(1, 2))])
@pytest.mark.parametrize('bounds', [
    ([0, 7, 8, 16], [0, 7, 8, 16]), ([0, 1, 2, 3], [0, 5, 6, 12]), ([0, 2, 2, 6], [0, 4, 4, 9]),
])
def test_packed(bounds, options):
    torch.manual_seed(0)
    bounds_q, bounds_k = bounds
    inputs = dict(q=tensor(bounds_q[-1], 4, 16), k=tensor(bounds_k[-1], 2, 16), v=tensor(bounds_k[-1], 2, 16))
    tensors = [torch.tensor(x, dtype=torch.int32) for x in bounds]
    lengths = [max(b - a for a, b in zip(x, x[1:], strict=False)) for x in bounds]
    compare(
        lambda **x: (flash_attn_varlen_func(**x, cu_seqlens_q=tensors[0], cu_seqlens_k=tensors[1],
                                            max_seqlen_q=lengths[0], max_seqlen_k=lengths[1], **options),),
        lambda **x: (pack(attend, **x, bounds_q=bounds_q, bounds_k=bounds_k, **options),),
        inputs, torch.float32,
    )


@pytest.mark.slow
def test_no_package_appears(tmp_path):
    """`flash_attn` is neither made nor replaced: Longhorn's attention has an installed one, else PyTorch's; fla's stays."""
    program = '''
import sys
import fla_longhorn, fla.layers.attn
from fla_longhorn.modules.attention import RowwiseAttention, load_attention
from transformers.utils import is_flash_attn_2_available
ours = load_attention().flash_attn_func.__module__
RowwiseAttention(hidden_size=8, num_heads=2)
of_fla = getattr(fla.layers.attn.flash_attn_func, '__module__', None)
print('flash_attn' in sys.modules, is_flash_attn_2_available(), of_fla, ours)
'''
    (tmp_path / 'flash_attn.py').write_text('def flash_attn_func(): pass\ndef flash_attn_varlen_func(): pass\n')
    printed = forks.output('-c', program, fla=False).split()
    assert printed == ['False', 'False', 'None', 'fla_longhorn.modules.flash_attention']
    printed = forks.output('-c', program, fla=False, env={'PYTHONPATH': f'{tmp_path}:{forks.ROOT}'}).split()
    assert printed[2:] == ['flash_attn'] * 2
