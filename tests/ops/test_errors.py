"""Bad calls: each documented error names the argument, what it got and what it takes."""

import pytest
import torch

from fla_longhorn.ops import backends, chunk_longhorn, fused_recurrent_longhorn, naive_recurrent_longhorn
from fla_longhorn.ops.backends import select_backend

OPS = [chunk_longhorn, fused_recurrent_longhorn, naive_recurrent_longhorn]
B, T, H, K, V = 2, 5, 2, 3, 4


def arguments(**changes):
    good = {
        'q': torch.randn(B, T, H, K),
        'k': torch.randn(B, T, H, K),
        'v': torch.randn(B, T, H, V),
        'beta': torch.rand(B, T, H, V),
    }
    return {**good, **changes}


def on(device, call):
    """The call on this device, but for what is on another one, or on the host, on purpose."""
    there = {name for name, x in call.items() if isinstance(x, torch.Tensor) and x.device.type == 'cpu'} - {'cu_seqlens_cpu'}
    return call | {name: call[name].to(device) for name in there}


def packed(cu_seqlens, **changes):
    return {name: x[:1] if x.dim() == 4 else x for name, x in arguments().items()} | {
        'cu_seqlens': torch.as_tensor(cu_seqlens), **changes,
    }


BAD = {
    'q is no tensor': (arguments(q=[1.0]), TypeError, 'q must be a torch.Tensor, got list'),
    'k is an integer': (
        arguments(k=torch.ones(B, T, H, K, dtype=torch.long)), TypeError, 'k must be float16.*got torch.int64',
    ),
    'q has 3 dimensions': (arguments(q=torch.randn(B, T, K)), ValueError, r'q must have shape \[B, T, H, K\]'),
    'no tokens': (
        {name: x[:, :0] for name, x in arguments().items()}, ValueError, 'q must have at least one .*token',
    ),
    'large K': (
        arguments(q=torch.randn(B, T, H, 257), k=torch.randn(B, T, H, 257)), ValueError,
        'state size K of at most 256, got 257',
    ),
    'k of another shape': (arguments(k=torch.randn(B, T, H, K + 1)), ValueError, r'k must have shape .*\[2, 5, 2, 3\], got'),
    'v of another length': (arguments(v=torch.randn(B, T + 1, H, V)), ValueError, r'v must have shape .*got \[2, 6, 2, 4\]'),
    'v without channels': (arguments(v=torch.randn(B, T, H, 0)), ValueError, 'v must have shape'),
    'beta of another width': (arguments(beta=torch.rand(B, T, H, V + 1)), ValueError, 'beta must have shape .*per channel'),
    'beta of another length': (arguments(beta=torch.rand(B, T + 1, H)), ValueError, 'beta must have shape .*per head'),
    'D of another shape': (arguments(D=torch.randn(H * V)), ValueError, r'D must have shape \[H, V\], here \[2, 4\]'),
    'z of another shape': (arguments(z=torch.randn(B, T, H, K)), ValueError, 'z must have shape'),
    'state of another shape': (
        arguments(initial_state=torch.zeros(B, H, V, K)), ValueError, r'initial_state must have shape \[N, H, K, V\]',
    ),
    'state in the other layout': (
        arguments(initial_state=torch.zeros(B, H, K, V), state_v_first=True), ValueError, r'initial_state .*\[N, H, V, K\]',
    ),
    'a decay per entry': (
        arguments(g=torch.zeros(B, T, H, V + 1)), ValueError, r'g must have shape \[B, T, H, V\] \(one decay per channel\)',
    ),
    'decays of other heads': (
        arguments(g=torch.zeros(B, T, H + 1)), ValueError, r'g must have shape \[B, T, H\] \(one decay per head\)',
    ),
    'g is a number': (arguments(g=-1.0), TypeError, 'g must be a torch.Tensor, got float'),
    'g is an integer': (arguments(g=torch.zeros(B, T, H).long()), TypeError, 'g must be float16, bfloat16 or float32'),
    'another device': (
        arguments(v=torch.empty(B, T, H, V, device='meta')), ValueError, r'v must be on the device of q \((cpu|cuda:\d)\)',
    ),
    'scale is a string': (arguments(scale='1'), TypeError, 'scale must be a number or None, got str'),
    'packed rows': (
        arguments(cu_seqlens=torch.tensor([0, T])), ValueError, 'cu_seqlens .*must have B = 1, got B = 2',
    ),
    'float boundaries': (packed([0.0, T]), TypeError, 'cu_seqlens must be an int32 or int64 tensor, got torch.float32'),
    'boundaries are a list': (packed([0, T]) | {'cu_seqlens': [0, T]}, TypeError, 'cu_seqlens must be .*got list'),
    'one boundary': (packed([0]), ValueError, r'cu_seqlens must have shape \[N \+ 1\]'),
    'boundaries start late': (packed([1, T]), ValueError, 'cu_seqlens must start at 0, got 1'),
    'boundaries end early': (packed([0, T - 1]), ValueError, 'cu_seqlens must end at the number of tokens T = 5, got 4'),
    'boundaries decrease': (packed([0, 4, 2, T]), ValueError, 'cu_seqlens must not decrease, got 4 followed by 2 at index 1'),
    'host copy alone': (
        packed([0, T], cu_seqlens_cpu=torch.tensor([0, T])) | {'cu_seqlens': None}, ValueError, 'cu_seqlens_cpu .*needs',
    ),
    'another host copy': (
        packed([0, T], cu_seqlens_cpu=torch.tensor([0, 2, T])), ValueError, 'cu_seqlens_cpu must be the host copy',
    ),
    'sigmoid is a number': (
        arguments(use_beta_sigmoid_in_kernel=1), TypeError, 'use_beta_sigmoid_in_kernel must be True or False, got int',
    ),
    'doubled': (
        arguments(allow_neg_eigval=1), TypeError, 'allow_neg_eigval must be True or False, got int',
    ),
    'layout is a string': (arguments(state_v_first='no'), TypeError, 'state_v_first must be True or False, got str'),
    'exact is a number': (arguments(exact=1), TypeError, 'exact must be True or False, got int'),
    'states for rows, not sequences': (
        packed([0, 2, T], initial_state=torch.zeros(1, H, K, V)), ValueError, r'initial_state must .*\[2, 2, 3, 4\]',
    ),
}


@pytest.mark.parametrize('op', OPS)
@pytest.mark.parametrize('name', list(BAD))
def test_bad_call(op, name, device):
    call, error, message = BAD[name]
    with pytest.raises(error, match=message):
        op(**on(device, call))


# on a GPU the copy is believed: comparing would wait for it
CONTRADICTIONS = {
    'host copy with other values': (
        packed([0, 4, T], cu_seqlens_cpu=torch.tensor([0, 2, T])), ValueError,
        r'cu_seqlens_cpu must be the host copy of cu_seqlens \(\[0, 4, 5\]\), got \[0, 2, 5\]',
    ),
    'boundaries far behind the end beside a good copy': (
        packed([0, 10**8], cu_seqlens_cpu=torch.tensor([0, T])), ValueError, 'cu_seqlens_cpu must be the host copy',
    ),
}


@pytest.mark.parametrize('op', OPS)
@pytest.mark.parametrize('name', list(CONTRADICTIONS))
def test_host_copy_that_contradicts(op, name):
    call, error, message = CONTRADICTIONS[name]
    with pytest.raises(error, match=message):
        op(**call)


@pytest.mark.parametrize('op', OPS[:2])
def test_a_host_copy_is_compared_on_request(op, monkeypatch, device):
    monkeypatch.setenv('FLA_LONGHORN_CHECK_VALUES', '1')
    call = {name: x[:1].to(device) for name, x in arguments().items()} | {'cu_seqlens': torch.tensor([0, 1, T], device=device)}
    op(**call, cu_seqlens_cpu=torch.tensor([0, 1, T]))
    with pytest.raises(ValueError, match=r'cu_seqlens_cpu must be the host copy of cu_seqlens \(\[0, 1'):
        op(**call, cu_seqlens_cpu=torch.tensor([0, 2, T]))


@pytest.mark.parametrize('op', OPS[:2])
@pytest.mark.parametrize('name', ['q', 'v', 'initial_state'])
def test_float64_is_for_the_naive_op(op, name, device):
    call = on(device, arguments(initial_state=torch.zeros(B, H, K, V)))
    call[name] = call[name].double()
    with pytest.raises(TypeError, match=f'{name} must be .*got float64, which naive_recurrent_longhorn takes'):
        op(**call)
    naive_recurrent_longhorn(**call)


def test_changed_boundaries_are_checked_again(device):
    call = on(device, packed([0, 2, T]))
    chunk_longhorn(**call)
    call['cu_seqlens'][1] = T + 1
    with pytest.raises(ValueError, match='cu_seqlens must not decrease'):
        chunk_longhorn(**call)


@pytest.mark.parametrize('op', OPS[:2])
def test_compiled_programs_check_boundaries_when_they_run(op):
    torch.compiler.reset()
    compiled = torch.compile(op, backend='eager', fullgraph=True)
    compiled(**packed([0, 2, T]))
    for bounds in ((0, 4, 2, 5), (0, 2, 10**8), (0, 2, 4), (1, 2, 5)):
        with pytest.raises(ValueError, match='cu_seqlens must'):
            compiled(**packed(bounds))


class TestBackend:
    def test_unknown(self, monkeypatch, device):
        monkeypatch.setenv('FLA_LONGHORN_BACKEND', 'cuda')
        with pytest.raises(ValueError, match="FLA_LONGHORN_BACKEND must be one of .*got 'cuda'"):
            chunk_longhorn(**on(device, arguments()))

    def test_triton_needs_a_gpu(self, monkeypatch):
        monkeypatch.delenv('TRITON_INTERPRET', raising=False)
        monkeypatch.setenv('FLA_LONGHORN_BACKEND', 'triton')
        with pytest.raises(ValueError, match='runs on a GPU'):
            chunk_longhorn(**arguments())

    def test_numba_needs_the_cpu(self, monkeypatch):
        monkeypatch.setenv('FLA_LONGHORN_BACKEND', 'numba')
        with pytest.raises(ValueError, match='numba runs on the CPU'):
            select_backend(torch.device('cuda'))

    @pytest.mark.parametrize('disable_recompute', [False, True])
    def test_shapes_need_none(self, monkeypatch, disable_recompute):
        monkeypatch.setenv('FLA_LONGHORN_BACKEND', 'numba')
        o, _ = chunk_longhorn(**on('meta', arguments()), exact=True, disable_recompute=disable_recompute)
        assert o.is_meta and o.shape == (B, T, H, V)

    @pytest.mark.parametrize('interpret, name', [('1', 'fla_longhorn.ops.triton'), ('0', 'fla_longhorn.ops.torch')])
    def test_default_on_the_cpu(self, monkeypatch, interpret, name):
        """Without a package; `packages/cpu/tests/longhorn/test_door.py` has one."""
        monkeypatch.delenv('FLA_LONGHORN_BACKEND', raising=False)
        monkeypatch.setenv('TRITON_INTERPRET', interpret)
        monkeypatch.setattr(backends, 'loops', None)
        assert select_backend(torch.device('cpu')).__name__ == name
