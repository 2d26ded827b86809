"""Mutations of fla's modules on the CPU."""

from tests.mutate.mutation import Mutation

UNIT = 'tests/fla_cpu/test_activations.py::test_gated_unit'
CONV = 'tests/fla_cpu/test_convolution.py::'
ATTENTION = 'tests/fla_cpu/test_flash_attention.py::'
LOOPS = 'tests/fla_cpu/test_loops.py::'
LOSS = 'tests/fla_cpu/test_losses.py::'
NORM = 'tests/fla_cpu/test_norms.py::'

MUTATIONS = [
    Mutation(
        'any-device', 'fla_cpu/backend.py', "return value.device.type == 'cpu', f", 'return True, f',
        "tensors of a GPU lose fla's kernels", 'tests/fla_cpu/test_cpu.py::test_other_devices_keep_the_kernels',
    ),
    Mutation(
        'float64-narrowed', 'fla_cpu/backend.py', 'return x if x.dtype == torch.float64 else x.float()', 'return x.float()',
        'gradients cannot be checked in float64', 'tests/fla_cpu/test_cpu.py::test_compute_dtype',
    ),
    Mutation(
        'elu-branch', 'fla_cpu/activations.py', 'torch.where(wide >= 0, wide + 1,', 'torch.where(wide >= 0, wide,',
        'elu_p1 lacks its one', 'tests/fla_cpu/test_activations.py::test_activation', 'dtype0',
    ),
    Mutation(
        'swiglu-dx', 'fla_cpu/activations.py', 'silu_backward(wide_g * y, wide_x)', 'silu_backward(wide_g, wide_x)',
        "the gate's gradient lacks the value", UNIT, 'dtype0-swiglu',
    ),
    Mutation(
        'convolution-turned', 'fla_cpu/convolution.py', 'y[:, lag:].addcmul_(x[:, :-lag], taps[-1 - lag])',
        'y[:, lag:].addcmul_(x[:, :-lag], taps[lag])', "the kernel's taps are in the other order", CONV + 'test_batch',
        '[33-4-dtype0-True -None]',
    ),
    Mutation(
        'convolution-history', 'fla_cpu/convolution.py', '(n, width + position[n, i])', '(n, width - 1 + position[n, i])',
        'the convolution starts from inputs one token too old', CONV + 'test_batch', '[33-4-dtype0-True -None]',
    ),
    Mutation(
        'convolution-dstate', 'fla_cpu/convolution.py',
        'dstate.mT.index_put_(self.state, drows[self.history], accumulate=True)',
        'pass', "the convolution's state has no gradient", CONV + 'test_batch', '[33-4-dtype0-True -None]',
    ),
    Mutation(
        'convolution-across-sequences', 'fla_cpu/convolution.py', 'dz[heads.stream] = 0', 'pass',
        'gradients cross the start of a packed sequence', CONV + 'test_packed_is_separate', '[4-dtype0 False-None]',
    ),
    Mutation(
        'convolution-cache-stale', 'fla_cpu/convolution.py', 'cache.copy_(window)', 'cache[..., -1] = token',
        'decoding keeps the older inputs where they were', CONV + 'test_update', 'shape0',
    ),
    Mutation(
        'convolution-blocks', 'fla_cpu/convolution.py', 'first = max(start, lag)', 'first = start + lag',
        'gradients do not cross blocks of time', CONV + 'test_several_blocks_of_time',
    ),
    Mutation(
        'stream-past', 'fla_cpu/loops.py', 'b_x1, b_x2, b_x3 = rows_before(x, t0 * stride + d, stride, t0 > bos)\n'
        '                    for t in', 'b_x1, b_x2, b_x3 = rows_before(x, t0 * stride + d, stride, t0 > 0)\n'
        '                    for t in', 'a convolution reads the rows of the sequence before',
        LOOPS + 'test_packed_streams', '[silu-dtype0]',
    ),
    Mutation(
        'stream-strips', 'fla_cpu/loops.py', 'rows_before(carried, 3 * BD + d - first, BD, t0 > bos)',
        'rows_before(carried, 3 * BD + d - first, BD, False)', 'gradients do not cross strips of tokens',
        LOOPS + 'test_streams', '[66-144-True-silu]',
    ),
    Mutation(
        'stream-short-sequence', 'fla_cpu/loops.py', 'if t1 >= bos + 2:', 'if t1 >= 2:',
        'a sequence of one token overwrites a gradient of the one before', LOOPS + 'test_packed_streams', '[silu-dtype0]',
    ),
    Mutation(
        'stream-bias-slope', 'fla_cpu/loops.py',
        'b_gate * (b_one + b_z * (b_one - b_gate))', 'b_gate * (b_one + b_z * b_gate)',
        "the activation's slope is wrong", LOOPS + 'test_streams', '[4-48-True-silu]',
    ),
    Mutation(
        'stream-bounds', 'fla_cpu/loops.py', 'return covered and bool((cu_seqlens.diff() >= 0).all())', 'return covered',
        'bounds that go back reach beyond the rows',
        LOOPS + 'test_rows_outside_of_sequences',
    ),
    Mutation(
        'stream-stride', 'fla_cpu/loops.py', 'rows.data_ptr(), rows.stride(0), taps', 'rows.data_ptr(), x.stride(1), taps',
        'one token a row is read beyond its memory', LOOPS + 'test_any_layout', 'token',
    ),
    Mutation(
        'window-off-by-one', 'fla_cpu/flash_attention.py', 'mask &= ahead >= -left', 'mask &= ahead > -left',
        'a window sees one key too few', ATTENTION + 'test_against_float64',
    ),
    Mutation(
        'causal-from-the-first-key', 'fla_cpu/flash_attention.py', 'torch.arange(S - T, S, dtype=torch.int64, device=device)',
        'torch.arange(T, dtype=torch.int64, device=device)',
        'with more keys than queries the first query stands at the first key',
        ATTENTION + 'test_against_float64',
    ),
    Mutation(
        'blind-queries', 'fla_cpu/flash_attention.py', 'o = o.masked_fill(blind[:, None, None], 0)', 'pass',
        'a query without keys gets the mean of all', ATTENTION + 'test_against_float64',
    ),
    Mutation(
        'ignored-labels-count', 'fla_cpu/losses.py', 'loss = (lse - score + z_loss).masked_fill_(ignored, 0)',
        'loss = lse - score + z_loss', 'ignored labels count in the loss', LOSS + 'test_cross_entropy', 'dtype0',
    ),
    Mutation(
        'label-smoothing', 'fla_cpu/losses.py', 'grad[here, index[block][here]] -= 1 - label_smoothing',
        'grad[here, index[block][here]] -= 1', "the label's gradient is not smoothed", LOSS + 'test_cross_entropy', 'dtype0',
    ),
    Mutation(
        'soft-cap-slope', 'fla_cpu/losses.py', 'grad.mul_(1 - (block_logits / logit_softcapping).square_())', 'pass',
        'capped logits have the gradient of free ones', LOSS + 'test_cross_entropy', 'dtype0',
    ),
    Mutation(
        'second-backward-scaled-twice', 'fla_cpu/losses.py', 'do == 1 else grad * do', 'do == 1 else grad.mul_(do)',
        'a second backward is scaled twice', LOSS + 'test_second_backward_is_scaled_once',
    ),
    Mutation(
        'kl-mean', 'fla_cpu/losses.py', "factor = 1 / N if reduction == 'batchmean' else 1.0", 'factor = 1.0',
        'batchmean is a sum', LOSS + 'test_kl_divergence', 'dtype0',
    ),
    Mutation(
        'rms-eps', 'fla_cpu/norms.py', '.square_().div_(D).add_(eps).rsqrt_()', '.square_().add_(eps).div_(D).rsqrt_()',
        'eps is divided by the width', NORM + 'test_norm', '[12-dtype0',
    ),
    Mutation(
        'rms-mean', 'fla_cpu/norms.py', 'dx.add_(mean_dy.mul_(rstd)[:, None])', 'pass',
        "RMSNorm's gradient loses its mean, as LayerNorm's does", NORM + 'test_norm', '[12-dtype0',
    ),
    Mutation(
        'residual-gradient', 'fla_cpu/norms.py', 'dx = dx.add_(dresidual)', 'pass', 'the residual stream loses its gradient',
        NORM + 'test_residual_stream', 'dtype0',
    ),
    Mutation(
        'rotation-back', 'fla_cpu/rotary.py', 'if conjugate:', 'if not conjugate:', 'rotations turn the other way',
        'tests/fla_cpu/test_rotary.py::test_packed',
    ),
    Mutation(
        'padding-rotated', 'fla_cpu/rotary.py', 'known = position >= 0', 'known = position >= -1',
        'the token before the first position is not padding', 'tests/fla_cpu/test_rotary.py::test_batch', '[-2 dtype0',
    ),
    Mutation(
        'shift-across-sequences', 'fla_cpu/rwkv.py', 'previous[first] = 0 if cache is None else',
        'previous[:1] = 0 if cache is None else',
        'a sequence sees the last token of the one before', 'tests/fla_cpu/test_rwkv.py::test_token_shift', 'False',
    ),
]
