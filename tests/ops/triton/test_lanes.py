"""The exact kernels in the layout of tensor cores: causal to the bit, what NaN reaches, sequences packed as alone."""

from dataclasses import replace

import pytest
import torch

from fla_longhorn.ops import chunk_longhorn
from fla_longhorn.selfcheck.case import Case, make_inputs, make_options
from tests.ops.cases import TRITON_DEVICE

if TRITON_DEVICE:
    from fla_longhorn.ops.triton.device import card_of
    from fla_longhorn.ops.triton.exact.configs import has_lanes
    from fla_longhorn.ops.triton.launch import LaunchKey

    CASE = Case(B=1, T=40, H=2, K=17, V=3, dtype=torch.bfloat16, D=True, z=True, sigmoid=True, lowest=-0.5)
    # the first that differs: in the second half of a chunk, and the second of a pair in the first half of one
    TOKENS = (12, 21)

    @pytest.fixture(params=[None, 'head'], ids=str)
    def case(request, triton_device):
        assert has_lanes(LaunchKey(CASE.K, CASE.V, 'bf16', card_of(triton_device)), None)
        return replace(CASE, g=request.param)

    def changed(inputs, token, value=None):
        """Other numbers from a token on, or one value of one channel there."""
        new = {name: x.detach().clone() for name, x in inputs.items()}
        for name, x in new.items():
            if name != 'D' and value is None:
                x[:, token:] = x[:, token:].flip(1)
        if value is not None:
            new['v'][:, token, 0, 1] = value
        return new

    def forward(inputs, options):
        with torch.no_grad():
            return chunk_longhorn(**{name: x.detach() for name, x in inputs.items()}, **options)

    def test_no_token_reaches_earlier_ones(case, triton_device):
        inputs, options = make_inputs(case, triton_device), make_options(case, triton_device, exact=True)
        o, _ = forward(inputs, options)
        for t in TOKENS:
            other, _ = forward(changed(inputs, t), options)
            assert torch.equal(other[:, :t], o[:, :t])
            assert not torch.equal(other[:, t], o[:, t])

    def test_no_gradient_reaches_later_tokens(case, triton_device):
        inputs, options = make_inputs(case, triton_device), make_options(case, triton_device, exact=True)
        o, _ = chunk_longhorn(**inputs, **options)
        do = torch.randn(o.shape, generator=torch.Generator().manual_seed(3)).to(o)
        of = [inputs['v'], inputs['beta']]
        gradients = torch.autograd.grad(o, of, do, retain_graph=True)
        for t in TOKENS:
            others = torch.autograd.grad(o, of, do.index_fill(1, torch.arange(t, device=do.device), 1.), retain_graph=True)
            for x, y in zip(gradients, others, strict=True):
                assert torch.equal(x[:, t:], y[:, t:])
                assert not torch.equal(x[:, t - 1], y[:, t - 1])

    @pytest.mark.parametrize('value', [float('nan'), float('inf')])
    @pytest.mark.filterwarnings('ignore:invalid value:RuntimeWarning')
    def test_what_a_value_without_a_number_reaches(value, case, triton_device):
        """Its channel, from its chunk's first token on, as products of zeros with it are NaN; nothing else to the bit."""
        inputs, options = make_inputs(case, triton_device), make_options(case, triton_device, exact=True)
        (o, state), (other, other_state) = (forward(x, options) for x in (inputs, changed(inputs, 21, value)))
        reached = torch.zeros_like(o, dtype=torch.bool)
        reached[:, 16:, 0, 1] = True
        assert torch.equal(o[~reached], other[~reached])
        assert not other[:, 21:, 0, 1].isfinite().any()
        channels = torch.tensor([0, 2], device=o.device)
        assert torch.equal(other_state[:, 1], state[:, 1])
        assert torch.equal(other_state[..., channels], state[..., channels])

    def test_packed_sequences_have_the_bits_of_those_alone(case, triton_device):
        """Empty ones too, before, between and after the others."""
        lengths = (0, 5, 0, 33, 17, 0)
        packed = replace(case.packed(*lengths), initial_state=True)
        inputs, options = make_inputs(packed, triton_device), make_options(packed, triton_device, exact=True)
        o, state = chunk_longhorn(**inputs, **options)
        names = [name for name in inputs if name not in ('D', 'initial_state')]
        gradients = torch.autograd.grad((o, state), [inputs[x] for x in names], (torch.ones_like(o), torch.ones_like(state)))
        start = 0
        for n, length in enumerate(lengths):
            part = {name: x.detach()[:, start:start + length].requires_grad_() for name, x in inputs.items() if name in names}
            whole = dict(D=inputs['D'], initial_state=inputs['initial_state'][n:n + 1])
            if length:
                single, last = chunk_longhorn(**part, **whole, **options | {'cu_seqlens': None})
                assert torch.equal(single, o[:, start:start + length])
                assert torch.equal(last, state[n:n + 1])
                ones = torch.ones_like(single), torch.ones_like(last)
                found = torch.autograd.grad((single, last), list(part.values()), ones)
                for name, x, y in zip(part, gradients, found, strict=True):
                    assert torch.equal(x[:, start:start + length], y), name
            else:
                assert torch.equal(state[n], inputs['initial_state'][n])
            start += length
