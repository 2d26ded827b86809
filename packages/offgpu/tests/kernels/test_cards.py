"""What a card has is enough for what is launched on it, or the error says in words what is not."""

from itertools import product

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.errors import OutOfResources

from benchmarks.kernels.launches import Call, rehearse, run_call
from fla_longhorn.ops.triton.device import make_card
from fla_longhorn.ops.triton.exact import forward
from offgpu.launches import rehearsal
from tests.devices import slow_but

LAYER = dict(V=768, T=4096, sigmoid=True, D=True, z=True)
# what requires the most, for a card of each kind; all calls for all cards compile for an hour
CARDS = ('sm_80', 'sm_86', 'sm_90', 'sm_120')
TABLE = [Call(exact=True, K=K, dtype=dtype, **LAYER) for K, dtype in (
    (64, torch.float32), (128, torch.bfloat16), (256, torch.bfloat16),
)]
# the forwards that require the most, where there is least
TIGHT = [
    *((x, Call(mode='infer', exact=True, K=128, dtype=torch.float16, **LAYER)) for x in ('sm_80', 'sm_86', 'sm_90', 'sm_120')),
    ('sm_120', Call(mode='infer', exact=True, K=128, **LAYER)),
]


@pytest.mark.parametrize(('target', 'call'), slow_but([TIGHT[1], TIGHT[4]], [*TIGHT, *product(CARDS, TABLE)]), ids=str)
def test_shared_memory_is_what_the_card_has(target, call):
    """As laid out by Triton; `test_compiled.py` goes down to machine code."""
    outcome = run_call(call, target, 'memory')
    assert outcome.error is None, outcome.error
    assert max(x['shared'] for x in outcome.launches) > 0


def test_too_large_a_state_raises_in_words(monkeypatch):
    """As Triton raises where a launch asks for more than there is."""
    def launch(*args, **kwargs):
        raise OutOfResources(150000, 101376, 'shared memory')

    monkeypatch.setattr(forward, 'chunk_longhorn_exact_gram', launch)
    with rehearsal('sm_86', 'launch'), pytest.raises(ValueError, match=(
        r'K = 128 in torch.float16 requires 1\d{5} of shared memory on sm_86, which has 101376; use a smaller K, '
        'another dtype, or FLA_LONGHORN_BACKEND=torch'
    )):
        rehearse(Call(mode='infer', exact=True, K=128, dtype=torch.float16, V=512))


def test_a_card_before_ampere_raises_in_words():
    message = r'compute capability 7.5, .* 8.0 \(Ampere\) or later; use FLA_LONGHORN_BACKEND=torch'
    with pytest.raises(ValueError, match=message):
        make_card(GPUTarget('cuda', 75, 32), {'max_shared_mem': 65536, 'multiprocessor_count': 40})
