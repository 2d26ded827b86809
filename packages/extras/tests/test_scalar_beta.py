"""One step a head as GLA and as the delta rule, by fla's kernels."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from fla_longhorn.ops import naive_recurrent_longhorn
from fla_longhorn.ops.arguments import StepOptions
from fla_longhorn.selfcheck.case import Case, make_inputs, make_options
from fla_longhorn.selfcheck.compare import relative_error
from fla_longhorn_extras import scalar_beta
from fla_longhorn_extras.scalar_beta import chunk_longhorn_by_fla
from tests.devices import INTERPRETING
from tests.ops.cases import assert_close, check, reference, run
from tests.ops.triton.conftest import interpreted_fla as interpreted_fla


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


@pytest.mark.parametrize('wrong, message', [
    ({'scalar_beta': False}, 'beta must have the shape'), ({'g': 'channel'}, 'g must have the shape'),
    ({'allow_neg_eigval': True}, 'allow_neg_eigval must be False'),
])
def test_what_fla_has_not(wrong, message):
    case = Case(H=1, T=4, **{'scalar_beta': True, **wrong})
    with pytest.raises(ValueError, match=message):
        chunk_longhorn_by_fla(**make_inputs(case), **make_options(case))


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
        assert_close(run(chunk_longhorn_by_fla, inputs, options), reference(inputs, options), case.dtype)

    @pytest.mark.usefixtures('interpreted_fla')
    @of_both
    @pytest.mark.parametrize('lowest', [-2., -12.])
    def test_decays_interpreted(exact, dtype, lowest):
        """Gated, with a token that starts anew."""
        case = Case(B=1, T=70, H=2, K=16, V=32, scalar_beta=True, initial_state=True, g='head', lowest=lowest, dtype=dtype)
        inputs, options = make_inputs(case), make_options(case, exact=exact)
        got, ref = (f(inputs, options) for f in (partial(run, chunk_longhorn_by_fla), reference))
        assert_close(got, ref, dtype)
        anew = inputs['g'].detach().clone()
        anew[:, 40] = -torch.inf
        with torch.no_grad():
            o, _ = chunk_longhorn_by_fla(**{**inputs, 'g': anew}, **options)
            want, _ = naive_recurrent_longhorn(**{name: x.double() for name, x in {**inputs, 'g': anew}.items()}, **options)
        assert relative_error(o, want) < 5e-3


if torch.cuda.is_available():
    @of_both
    @pytest.mark.parametrize('K', [16, 64, 128])
    def test_kernels(exact, dtype, K, triton_device):
        case = Case(B=2, T=300, H=2, K=K, V=64, dtype=dtype, scalar_beta=True, initial_state=True)
        check(chunk_longhorn_by_fla, case, triton_device, exact)
