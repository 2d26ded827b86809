"""One step a head as GLA and as the delta rule, by fla's kernels."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from fla_longhorn.ops import chunk_longhorn, naive_recurrent_longhorn, scalar_beta
from fla_longhorn.ops.arguments import Arguments, StepOptions
from fla_longhorn.selfcheck.case import Case, make_inputs, make_options
from fla_longhorn.selfcheck.compare import relative_error
from tests.devices import INTERPRETING
from tests.ops.cases import assert_close, check, reference, run


def through_fla(scale=None, **options):
    """`chunk_scalar_beta`, called as the public op is."""
    return scalar_beta.chunk_scalar_beta(Arguments(scale=1.0 if scale is None else scale, **options))


def test_no_cancellation():
    """`1 - eps k^2` keeps its digits where it is near 0, down to one entry a key."""
    for k in (torch.tensor([[[[1e4, 0.0]]]]), torch.tensor([[[[1e4, 1.0]]]]), torch.tensor([[[[3e3]]]])):
        beta = torch.full(k.shape[:3], 0.5)
        eps, log_decay = scalar_beta.steps(k, beta, StepOptions(False, False))
        exact_eps, exact_decay = scalar_beta.steps(k.double(), beta.double(), StepOptions(False, False))
        torch.testing.assert_close(eps.double(), exact_eps, rtol=1e-6, atol=0)
        torch.testing.assert_close(log_decay.double(), exact_decay, rtol=1e-6, atol=1e-6)
        k, beta = k.double(), beta.double()[..., None]
        naive = torch.log1p(-beta / (1 + beta * k.square().sum(-1, keepdim=True)) * k.square())
        torch.testing.assert_close(exact_decay, naive, rtol=1e-6, atol=1e-9)


def test_route(monkeypatch):
    """The CPU and float32 have no such kernels; a GPU's calls go by the rule, or where they are sent."""
    inputs = make_inputs(Case(H=1, T=1, scalar_beta=True))
    tensors = [inputs[name] for name in ('q', 'k', 'v', 'beta')]

    class OnGPU:
        device = torch.device('cuda')

        def __init__(self, *shape, dtype=torch.bfloat16):
            self.shape, self.dtype, self.dim = shape, dtype, lambda: len(shape)

    def arguments(K, dtype=torch.bfloat16, scalar=True):
        return *(OnGPU(2, 64, 1, size, dtype=dtype) for size in (K, K, 48)), OnGPU(2, 64, 1, *[48] * (not scalar))

    def route(*args, exact):
        return scalar_beta.applies(Arguments(*args, exact=exact))

    for asked, small, large, exact in (('', False, True, False), ('fla', True, True, True), ('own', False, False, False)):
        monkeypatch.setenv('FLA_LONGHORN_SCALAR_BETA', asked)
        assert route(*arguments(32), exact=False) is small
        assert route(*arguments(64), exact=False) is large
        assert route(*arguments(128), exact=True) is exact
        assert not route(*arguments(128, torch.float32), exact=False)
        assert not route(*arguments(128, scalar=False), exact=False)
        assert not route(*tensors, exact=False)
        q, k, v, beta = arguments(128)
        for mixed in ((arguments(128, torch.float32)[0], k, v), (q, arguments(128, torch.float32)[1], v),
                      (q, k, arguments(128, torch.float32)[2])):
            assert not route(*mixed, beta, exact=False)
        # GLA has no decay per channel
        assert scalar_beta.applies(Arguments(*arguments(64), g=OnGPU(2, 64, 1))) is large
        assert not scalar_beta.applies(Arguments(*arguments(64), g=OnGPU(2, 64, 1, 48)))
    monkeypatch.setenv('FLA_LONGHORN_SCALAR_BETA', 'gla')
    with pytest.raises(ValueError, match="FLA_LONGHORN_SCALAR_BETA must be one of .*, got 'gla'"):
        route(*tensors, exact=False)


# fla's delta rule rounds the inverse of a chunk's triangle to its inputs' dtype, which in bfloat16 costs about 1e-2
of_both = pytest.mark.parametrize('exact, dtype', [
    (False, torch.bfloat16), (True, torch.float16),
], ids=['diagonal-bfloat16', 'exact-float16'])

if INTERPRETING:
    PACKED = Case(
        H=2, K=16, V=32, scalar_beta=True, sigmoid=True, D=True, z=True, initial_state=True, scale=0.5,
        state_v_first=True,
    ).packed(17, 1, 0, 66)

    @pytest.mark.usefixtures('interpreted_fla')
    @of_both
    @pytest.mark.parametrize('size', [1, 6, None], ids=['keys x 1', 'keys x 6', 'packed'])
    def test_kernels_interpreted(exact, dtype, size):
        """fla's own kernels give our results, also where `1 - eps k^2` is near 0."""
        case = Case(B=1, T=70, H=1, K=32, V=32, scalar_beta=True, initial_state=True) if size else PACKED
        case = replace(case, dtype=dtype)
        inputs, options = make_inputs(case), make_options(case, exact=exact)
        inputs['k'] = (inputs['k'].detach() * (size or 1)).requires_grad_()
        assert_close(run(through_fla, inputs, options), reference(inputs, options), case.dtype)

    @pytest.mark.usefixtures('interpreted_fla')
    @of_both
    @pytest.mark.parametrize('lowest', [-2., -12.])
    def test_decays_interpreted(exact, dtype, lowest):
        """Gated, with a token that starts anew."""
        case = Case(B=1, T=70, H=2, K=16, V=32, scalar_beta=True, initial_state=True, g='head', lowest=lowest, dtype=dtype)
        inputs, options = make_inputs(case), make_options(case, exact=exact)
        got, ref = (f(inputs, options) for f in (partial(run, through_fla), reference))
        assert_close(got, ref, dtype)
        anew = inputs['g'].detach().clone()
        anew[:, 40] = -torch.inf
        with torch.no_grad():
            o, _ = through_fla(**{**inputs, 'g': anew}, **options)
            want, _ = naive_recurrent_longhorn(**{name: x.double() for name, x in {**inputs, 'g': anew}.items()}, **options)
        assert relative_error(o, want) < 5e-3


if torch.cuda.is_available():
    @of_both
    @pytest.mark.parametrize('K', [16, 64, 128])
    def test_kernels(exact, dtype, K, monkeypatch, triton_device):
        monkeypatch.setenv('FLA_LONGHORN_SCALAR_BETA', 'fla')
        case = Case(B=2, T=300, H=2, K=K, V=64, dtype=dtype, scalar_beta=True, initial_state=True)
        check(chunk_longhorn, case, triton_device, exact)
