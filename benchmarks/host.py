"""Host time of a call: microseconds from the public operator to its last launch, beside fla's operators, without a GPU.

    python -m offgpu.pretend.build
    python -m benchmarks host [--rounds 200] [--profile NAME]

Tensors lie on the pretend CUDA device, so PyTorch dispatches, allocates and differentiates as on a GPU. Triton's launch path
runs up to its launcher in C, which is left out, as are the kernels. Small shapes, for PyTorch's own kernels run on this CPU.
The backward runs in the caller's thread. Rounds take the operators in turn; the least time of each counts, for other load only
adds to it. The last column is the ratio to fla's delta rule.
"""

from __future__ import annotations

import argparse
import cProfile
import importlib
import pstats
import sys
import time
from collections.abc import Callable
from unittest import mock

from offgpu import pretend
from offgpu.pretend import triton_driver

B, T, K, V = 2, 128, 16, 64
BASELINE = 'chunk_delta_rule'
LAUNCHED = {'at': 0.0, 'count': 0}


def install() -> None:
    """The pretend device for PyTorch, and for Triton a driver whose kernels do nothing."""
    with mock.patch.object(triton_driver, 'install', lambda: None):
        pretend.install()
        import torch
    import triton

    from offgpu.launches import Driver, compile_for_driver

    def note(*_: object) -> None:
        LAUNCHED['at'], LAUNCHED['count'] = time.perf_counter(), LAUNCHED['count'] + 1

    class Noting(Driver):
        def launcher_cls(self, source, metadata):
            return note

        def get_benchmarker(self):
            return lambda call, quantiles=None, **_: [1.0] * len(quantiles or [1])

        def get_empty_cache_for_benchmark(self):
            return torch.empty(1, device='cuda')

        def clear_cache(self, cache) -> None: ...

    device = Noting('sm_90', 'launch')
    device.device, device.tensors = 0, 'cuda'
    triton.runtime.driver.set_active(device)
    triton.compiler.compile = compile_for_driver


def make_calls() -> dict[str, Callable[[], tuple]]:
    """Each makes an operator's inputs and returns (the forward, its leaves); a decoded token has none."""
    import torch

    from fla_longhorn import ops

    def draw(*shape: int, leaf: bool = True) -> torch.Tensor:
        return torch.rand(*shape, dtype=torch.bfloat16, device='cuda').requires_grad_(leaf)

    def longhorn(**options):
        q, k, v, beta = draw(B, T, 1, K), draw(B, T, 1, K), draw(B, T, 1, V), draw(B, T, 1, V)
        return lambda: ops.chunk_longhorn(q, k, v, beta, **options)[0], [q, k, v, beta]

    def of_fla(module: str, name: str, gate: bool = False, tokens: int = T, leaf: bool = True):
        op = getattr(importlib.import_module(f'fla.ops.{module}'), name)
        q, k, v, beta = (draw(B, tokens, *x, leaf=leaf) for x in ((1, K), (1, K), (1, V), (1,)))
        more = {'g': -draw(B, tokens, 1, K, leaf=False)} if gate else {}
        return lambda: op(q, k, v, beta=beta, **more)[0], [q, k, v, beta] if leaf else []

    def token(**options):
        q, k, v, beta = (draw(B, 1, 1, n, leaf=False) for n in (K, K, V, V))
        state = torch.zeros(B, 1, K, V, device='cuda', dtype=torch.float32)
        return lambda: ops.longhorn_state_update(state, q, k, v, beta, **options), []

    return {
        BASELINE: lambda: of_fla('delta_rule', BASELINE), 'chunk_kda': lambda: of_fla('kda', 'chunk_kda', gate=True),
        'chunk_longhorn, exact': lambda: longhorn(exact=True), 'chunk_longhorn, diagonal': longhorn,
        'fused_recurrent_delta_rule': lambda: of_fla('delta_rule', 'fused_recurrent_delta_rule', tokens=1, leaf=False),
        'longhorn_state_update': token,
    }


def microseconds(run: Callable[[], object]) -> tuple[float, int, object]:
    """Until the last launch, how many there were, and what was returned."""
    LAUNCHED['count'], start = 0, time.perf_counter()
    out = run()
    return 1e6 * (LAUNCHED['at'] - start), LAUNCHED['count'], out


def once(run: Callable[[], object], leaves: list) -> dict[str, tuple[float, int]]:
    import torch
    with torch.set_grad_enabled(bool(leaves)), torch.autograd.set_multithreading_enabled(False):
        us, count, o = microseconds(run)
        if not leaves:
            return {'token': (us, count)}
        back, launches, _ = microseconds(lambda: torch.autograd.grad(o, leaves, torch.ones_like(o)))
        return {'forward': (us, count), 'backward': (back, launches)}


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog='python -m benchmarks host', description=(__doc__ or '').splitlines()[0])
    parser.add_argument('--rounds', type=int, default=200)
    parser.add_argument('--profile', metavar='NAME', help='of one operator: what its calls spend')
    options = parser.parse_args(args)
    if 'torch' in sys.modules:
        raise SystemExit('the pretend device comes before torch: run this as a program of its own')
    install()
    calls = {name: make() for name, make in make_calls().items()}
    for call in list(calls.values()) * 3:
        once(*call)
    if options.profile:
        with cProfile.Profile() as profile:
            for _ in range(options.rounds):
                once(*calls[options.profile])
        pstats.Stats(profile).sort_stats('tottime').print_stats(35)
        return
    found: dict[tuple[str, str], list[tuple[float, int]]] = {}
    for _ in range(options.rounds):
        for name, call in calls.items():
            for what, row in once(*call).items():
                found.setdefault((name, what), []).append(row)
    for (name, what), rows in found.items():
        base = found.get((BASELINE, what), found['fused_recurrent_delta_rule', 'token'])
        us, launches = min(rows)
        print(f'{name:28}{what:10}{us:8.0f} us  {launches} launches  {us / min(base)[0]:.2f}')


if __name__ == '__main__':
    main()
