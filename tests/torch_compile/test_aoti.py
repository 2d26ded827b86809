"""AOTInductor: a model with its states as arguments, compiled into a package and loaded in another process."""

import pytest
import torch

from fla_longhorn_extras.with_states import WithStates
from tests import forks
from tests.torch_compile.graphs import cheap_kernels
from tests.torch_compile.test_model import build

BATCH, LENGTH = torch.export.Dim('batch', min=1, max=64), torch.export.Dim('length', min=2, max=1 << 16)
# in a process that has not compiled them
GENERATE = '''
import sys
import torch
import fla_longhorn

folder = sys.argv[1]
prefill, step = (torch._inductor.aoti_load_package(f'{folder}/{name}.pt2') for name in ('prefill', 'step'))
prompt, states, count = torch.load(f'{folder}/prompt.pt')
logits, *states = prefill(prompt, *states)
tokens = [logits.argmax(-1, keepdim=True)]
while len(tokens) < count:
    logits, *states = step(tokens[-1], *states)
    tokens.append(logits.argmax(-1, keepdim=True))
torch.save(torch.cat(tokens, 1), f'{folder}/tokens.pt')
'''


@cheap_kernels
@pytest.mark.compiler
@pytest.mark.slow
def test_generates_the_same_tokens(exact, tmp_path, device):
    model = build(device, layers=2, exact=exact, tie_word_embeddings=False).eval()
    program = WithStates(model)
    rows = {1: BATCH}
    with torch.no_grad():
        for name, T, length in (('prefill', 5, {1: LENGTH}), ('step', 1, {})):
            ids = torch.randint(53, (3, T), device=device)
            exported = torch.export.export(
                program, (ids, *program.new_states(3)), dynamic_shapes=({0: BATCH, **length}, rows, rows),
            )
            torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / f'{name}.pt2'))
    for B, T in ((1, 2), (3, 70)):
        prompt = torch.randint(1, 53, (B, T), device=device)
        torch.save((prompt, program.new_states(B), 100), tmp_path / 'prompt.pt')
        forks.output('-c', GENERATE, tmp_path)
        expected = model.generate(prompt, max_new_tokens=100, do_sample=False, eos_token_id=None)[:, T:]
        assert torch.equal(torch.load(tmp_path / 'tokens.pt'), expected)
        assert all(len(row.unique()) > 5 for row in expected)
