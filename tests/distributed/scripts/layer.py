"""The layer over four ranks: writes its relative errors to the file it is given.

    python -m tests.distributed.scripts.layer NUMBER_OF_RANKS FILE
"""

import json
import sys

import torch
import torch.distributed as dist
from fla.ops.cp import build_cp_context
from torch.utils.checkpoint import checkpoint

from fla_longhorn import Longhorn
from tests.distributed.scripts.launch import fork
from tests.ops.cases import relative_error

LAYERS = {
    'paper': {},
    'heads': {'num_heads': 2, 'state_size': 5, 'mode': 'fused_recurrent'},
    'scalar_beta': {'scalar_beta': True, 'num_heads': 4, 'state_size': 8},
    'exact': {'exact': True, 'num_heads': 2, 'state_size': 6},
    'bias': {'use_bias': True, 'conv_bias': False, 'conv_size': 3, 'expand': 1.5, 'k_norm': 'l2'},
    'no look back': {'conv_size': 1},
}
# of the sequences, for four ranks
LENGTHS = {
    'whole': (280,),
    'ragged': (3, 60, 8, 1, 208),
    'on the edges, and next to them': (70, 71, 68, 71),
    'two tokens a rank, fewer than the convolution sees': (1, 7),
    'one token a rank': (4,),
}
CHECKPOINTED = ('paper', 'exact')


def layer_errors(name: str, lengths: tuple[int, ...], checkpointed: bool = False) -> dict[str, float] | None:
    """On rank 0, those of the output, of the input's gradient and of each parameter's, summed over ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    layer = Longhorn(hidden_size=24, layer_idx=0, **LAYERS[name])
    with torch.no_grad():
        for x in layer.parameters():
            x.add_(torch.randn_like(x) * 0.2)
    h, do = torch.randn(2, 1, sum(lengths), 24)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)

    def run(h, do, checkpointed=False, **options):
        layer.zero_grad()
        h = h.clone().requires_grad_()
        o = checkpoint(layer, h, use_reentrant=False, **options)[0] if checkpointed else layer(h, **options)[0]
        o.backward(do)
        with torch.no_grad():
            without_grad = layer(h, **options)[0]
        grads = {x: p.grad.clone() for x, p in layer.named_parameters()}
        return {'o': o.detach(), 'o without grad': without_grad, 'h': h.grad, **grads}

    part = run(
        *(x.chunk(size, 1)[rank] for x in (h, do)), checkpointed, cp_context=build_cp_context(cu_seqlens, dist.group.WORLD),
    )
    parts = [None] * size if rank == 0 else None
    dist.gather_object(part, parts)
    if rank > 0:
        return None
    tokenwise = ('o', 'o without grad', 'h')
    got = {x: torch.cat([p[x] for p in parts], 1) if x in tokenwise else sum(p[x] for p in parts) for x in part}
    ref = run(h, do, cu_seqlens=cu_seqlens)
    return {x: relative_error(got[x], ref[x]) for x in ref}


def main(path: str):
    errors = {
        f'{name}, {case}': layer_errors(name, lengths) for name in LAYERS for case, lengths in LENGTHS.items()
    }
    for name in CHECKPOINTED:
        errors[f'{name}, checkpointed'] = layer_errors(name, LENGTHS['ragged'], checkpointed=True)
    if dist.get_rank() == 0:
        with open(path, 'w') as file:
            json.dump(errors, file)


if __name__ == '__main__':
    fork(main, int(sys.argv[1]), sys.argv[2])
