"""A model on cuda:1 while cuda:0 is the current device: kernels run where the tensors are."""

from tests import forks

PROGRAM = '''
from contextlib import nullcontext

import pytest
import torch

from fla_longhorn import LonghornConfig, LonghornForCausalLM
from fla_longhorn.ops.triton import common
from fla_longhorn.ops.arguments import Arguments
from fla_longhorn.ops.triton.diagonal import summaries

HYBRID = {'num_hidden_layers': 2, 'attn': {'layers': [1], 'num_heads': 2}}
OPTIONS = {}, {'exact': True}, {'k_norm': 'l2', 'num_heads': 2, **HYBRID}


def use(options, device):
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, num_hidden_layers=1, vocab_size=32, state_size=4)
    model = LonghornForCausalLM(LonghornConfig(**sizes | options))
    ids = torch.randint(3, 32, (2, 5))
    model, ids = model.to(device), ids.to(device)
    loss = model(ids, labels=ids).loss
    loss.backward()
    tokens = model.eval().generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert tokens.device == loss.device == torch.device(device) and torch.cuda.current_device() == 0
    return [loss.item(), tokens.tolist(), [p.grad.norm().item() for p in model.parameters()]]


for options in OPTIONS:
    assert use(options, 'cuda:0') == use(options, 'cuda:1')
q, k, v, beta = torch.rand(4, 1, 5, 1, 4, device='cuda:1')
args = Arguments(q, k, v, beta)
assert all(x.device == q.device for x in (*summaries.forward_summary(args), summaries.backward_summary(v, args)))
# a planted fault
common.custom_device_ctx = lambda index: nullcontext()
for call in (lambda: use({}, 'cuda:1')), (lambda: summaries.forward_summary(args)):
    with pytest.raises(ValueError, match='is launched on cuda:0 with a tensor on cuda:1'):
        call()
print('done')
'''


def test_kernels_follow_their_tensors():
    assert forks.output('-c', PROGRAM, env={'PRETEND_IMPORT': '', 'PRETEND_DEVICES': '2'}).endswith('done\n')
