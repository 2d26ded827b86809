"""Sequences split over ranks: outputs and gradients of each rank's tokens, against the naive op on all tokens in float64."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from fla.ops.cp import build_cp_context
from fla.ops.longhorn import chunk_longhorn, naive_recurrent_longhorn
from fla.utils import assert_close, device


def run_rank(rank: int, world_size: int, store: str, lengths: list[int], exact: bool):
    backend = 'nccl' if device == 'cuda' else 'gloo'
    dist.init_process_group(backend, init_method=f'file://{store}', rank=rank, world_size=world_size)
    if device == 'cuda':
        torch.cuda.set_device(rank)
    torch.manual_seed(42)
    T, H, K, V = sum(lengths), 2, 4, 12
    sizes = {'q': (K,), 'k': (K,), 'v': (V,), 'beta': (V,), 'z': (V,), 'g': ()}
    inputs = {name: torch.randn(1, T, H, *size).to(device) for name, size in sizes.items()}
    inputs['beta'], inputs['g'] = inputs['beta'].sigmoid(), inputs['g'].sigmoid().log()
    do = torch.randn(1, T, H, V).to(device)
    cu_seqlens = torch.tensor([0, *lengths], device=device).cumsum(0)

    whole = {name: x.double().requires_grad_() for name, x in inputs.items()}
    ref, _ = naive_recurrent_longhorn(**whole, exact=exact, cu_seqlens=cu_seqlens)
    ref.backward(do.double())

    own = slice(rank * T // world_size, (rank + 1) * T // world_size)
    part = {name: x[:, own].clone().requires_grad_() for name, x in inputs.items()}
    tri, _ = chunk_longhorn(**part, exact=exact, cp_context=build_cp_context(cu_seqlens, group=dist.group.WORLD))
    tri.backward(do[:, own])
    assert_close('o', ref[:, own].float(), tri, 1e-4)
    for name, x in part.items():
        assert_close(f'd{name}', whole[name].grad[:, own].float(), x.grad, 1e-4)
    dist.destroy_process_group()


@pytest.mark.skipif(device == 'cuda' and torch.cuda.device_count() < 4, reason='needs 4 GPUs')
@pytest.mark.parametrize('exact', [False, True])
@pytest.mark.parametrize(
    ('world_size', 'lengths'),
    [
        pytest.param(2, [50, 14], id='cut'),
        pytest.param(2, [32, 32], id='aligned'),
        pytest.param(4, [5, 52, 7], id='middle-ranks'),
    ],
)
def test_ranks(world_size: int, lengths: list[int], exact: bool, tmp_path):
    arguments = world_size, str(tmp_path / 'store'), lengths, exact
    mp.start_processes(run_rank, arguments, nprocs=world_size, start_method='spawn' if device == 'cuda' else 'fork')
