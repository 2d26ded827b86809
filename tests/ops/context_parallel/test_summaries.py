"""Summaries by Triton's kernels: final state = decay * initial state + local, and the gradient of the initial state."""

from dataclasses import replace

import pytest
import torch

from fla_longhorn.ops import naive_recurrent_longhorn
from fla_longhorn.ops.arguments import Arguments
from fla_longhorn.ops.checkpoints import checkpoint_interval
from fla_longhorn.ops.triton.diagonal import segments
from fla_longhorn.ops.triton.diagonal import summaries as kernels
from fla_longhorn.selfcheck.case import Case, make_inputs, make_options
from fla_longhorn.selfcheck.compare import relative_error
from tests.devices import INTERPRETING

INTERVAL = checkpoint_interval(4)
LONG = Case(B=1, T=3 * INTERVAL + 6, H=1, K=4, V=9, g='channel', initial_state=True)


if INTERPRETING or torch.cuda.is_available():
    @pytest.mark.parametrize('count', [1, 8])
    @pytest.mark.parametrize('case', [LONG, replace(LONG, H=2, g='head', z=True, scalar_beta=True, layout='view')], ids=str)
    def test_summaries(monkeypatch, case, count, triton_device):
        monkeypatch.setenv('FLA_LONGHORN_BACKEND', 'triton')
        monkeypatch.setattr(segments, 'choose_segment_length', lambda *args: count * INTERVAL)
        inputs, options = make_inputs(case, triton_device), make_options(case, triton_device) | {'scale': 0.5}
        doubles = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}
        o, final_state = naive_recurrent_longhorn(**doubles, **options)
        do = torch.randn(o.shape, generator=torch.Generator().manual_seed(3)).to(triton_device)
        dh0, = torch.autograd.grad(o, doubles['initial_state'], do.double())
        args = Arguments(**{name: x.detach() for name, x in inputs.items()}, **options)
        decay, local = kernels.forward_summary(args)
        assert relative_error(decay * args.initial_state + local, final_state.detach()) < 1e-6
        assert relative_error(kernels.backward_summary(do, args), dh0) < 1e-6
