"""Forward and backward of Longhorn as the layer calls it and of fla's operators: by kernels, eager, in a CUDA graph."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from unittest import mock

import torch
import torch.nn.functional as F
from triton.runtime.autotuner import Autotuner

from benchmarks.measure.timing import describe_error
from fla_longhorn.ops import chunk_longhorn, longhorn_state_update
from fla_longhorn.ops.triton.exact.configs import GENERAL_KERNELS

PEERS = {
    'chunk_delta_rule': 'delta_rule', 'chunk_gated_delta_rule': 'gated_delta_rule', 'chunk_kda': 'kda', 'chunk_gla': 'gla',
}
# of a token in one launch
STEPS = {'fused_recurrent_gated_delta_rule': 'gated_delta_rule', 'fused_recurrent_kda': 'kda'}
# calls in a profile and in a graph
PROFILED = 10
# lengths of the sequences of a packed call, of as many tokens as a dense one
PACKED = (4096, 37, 2500, 1, 1000, 3000, 700, 50, 2200, 2800)
# whose backward fla refuses
GATED = ('chunk_gated_delta_rule', 'Gated DeltaNet')


# of autotuned kernels, which have up to 96: all but the passes' choose among so many, from the first to the last
CONFIGURATIONS = 6


@contextmanager
def few_configurations() -> Iterator[None]:
    prune = Autotuner.prune_configs

    def some(self: Autotuner, kwargs: dict) -> list:
        configs = prune(self, kwargs)
        return configs[::-(-len(configs) // CONFIGURATIONS)]

    with mock.patch.object(Autotuner, 'prune_configs', some):
        yield


def refusal(name: str) -> str | None:
    """Why fla does not train `name` on this device, if so: what Triton makes of it would be wrong."""
    from fla.utils import IS_NVIDIA_HOPPER, TRITON_ABOVE_3_7_1

    wrong = IS_NVIDIA_HOPPER and not TRITON_ABOVE_3_7_1
    return 'on Hopper with Triton before 3.7.1, its issue 640' if wrong and name in GATED else None


@dataclass(frozen=True)
class Call:
    """An operator's call in bfloat16, with one head; `gate` is 'head' or 'channel'; `packed`: all tokens in one row."""

    name: str
    K: int
    B: int = 8
    T: int = 2048
    V: int = 4096
    gate: str | None = None
    packed: bool = False
    # the exact update's general kernels where those in the layout of tensor cores serve
    general: bool = False

    def __str__(self) -> str:
        more = f', gate per {self.gate}' if self.gate else ', packed' if self.packed else ''
        more += ', general kernels' if self.general else ''
        return f'{self.name}{more}, K = {self.K}, {self.B} x {self.T} x {self.V}'


def make_plan() -> dict[str, Call]:
    both, peers = ('exact', 'diagonal'), tuple(PEERS)
    calls = [Call(name, 16) for name in (*both, 'chunk_delta_rule')] + [Call(name, 64) for name in (*both, *peers)]
    calls += [Call('exact', K, general=True) for K in (16, 64)]
    calls += [Call(name, K, gate='head') for K in (16, 64) for name in both]
    calls += [Call(name, 16, 1, sum(PACKED), packed=True) for name in both]
    calls += [Call(name, 64, 1, sum(PACKED), packed=True) for name in (*both, *peers)]
    calls += [Call(name, 128) for name in both]
    # while there is time: decays per channel, one long row, a token of many sequences
    calls += [Call(name, K, gate='channel') for K in (16, 64) for name in both]
    calls += [Call(name, 16, 1, 131072) for name in both] + [Call('exact', 16, 1, 131072, gate='head')]
    calls += [Call(name, K, 64, 1) for K in (16, 64) for name in both] + [Call(name, 64, 64, 1) for name in STEPS]
    return {str(call): call for call in calls}


PLAN = make_plan()


def items(device: str) -> list[str]:
    return [*PLAN]


def make_call(call: Call, device: str) -> tuple[Callable[[], torch.Tensor], list[torch.Tensor]]:
    """A forward on random inputs and its leaves; without leaves, it has no backward."""
    B, T, K, V = call.B, call.T, call.K, call.V

    def draw(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*sizes, device=device, dtype=dtype)

    ends = torch.tensor([0, *PACKED]).cumsum(0)
    # without memory, chunk_gla reads the numbers there too
    there = 'cpu' if device == 'meta' and call.name in PEERS else device
    packing = dict(cu_seqlens=ends.to(there), cu_seqlens_cpu=ends) if call.packed else {}
    q, k, v = draw(B, T, 1, K), draw(B, T, 1, K), draw(B, T, 1, V)
    if call.name in ('exact', 'diagonal'):
        more = dict(beta=draw(B, T, 1, V), D=draw(1, V), z=draw(B, T, 1, V))
        if call.gate:
            more['g'] = F.logsigmoid(draw(B, T, 1, *([] if call.gate == 'head' else [V]), dtype=torch.float32) + 3)
        options = dict(exact=call.name == 'exact', use_beta_sigmoid_in_kernel=True) | packing
        if T == 1:
            state = draw(B, 1, K, V, dtype=torch.float32)
            return lambda: longhorn_state_update(state, q, k, v, **more, **options), []
        leaves = [x.requires_grad_() for x in (q, k, v, *more.values())]
        return lambda: chunk_longhorn(q, k, v, **more, **options)[0], leaves
    k = F.normalize(k.float(), dim=-1).bfloat16()
    more = {} if call.name == 'chunk_gla' else dict(beta=draw(B, T, 1).sigmoid())
    if call.name != 'chunk_delta_rule':
        more['g'] = F.logsigmoid(draw(B, T, 1, *([] if 'gated' in call.name else [K]), dtype=torch.float32))
    operator = getattr(importlib.import_module(f'fla.ops.{(PEERS | STEPS)[call.name]}'), call.name)
    if T == 1:
        state = draw(B, 1, K, V, dtype=torch.float32)
        return lambda: operator(q, k, v, **more, scale=1.0, initial_state=state, output_final_state=True)[0], []
    leaves = [x.requires_grad_() for x in (q, k, v, *more.values())]
    return lambda: operator(q, k, v, **more, **packing, scale=1.0)[0], leaves


def run(item: str, device: str) -> Iterator[dict]:
    """A row for the forward and one for the backward."""
    call = PLAN[item]
    kernels = mock.patch.dict(os.environ, {GENERAL_KERNELS: '1'}) if call.general else nullcontext()
    forward, leaves = make_call(call, device)

    def prepare() -> Callable[[], object]:
        o = forward()
        do = torch.randn_like(o)
        return lambda: torch.autograd.grad(o, leaves, do, retain_graph=True)

    # all of GLA's 278 would take the time of three calls
    few = few_configurations() if call.name == 'chunk_gla' else nullcontext()
    # with what a backward reads, where it has one
    with kernels, few, nullcontext() if leaves else torch.no_grad():
        yield {'pass': 'fwd'} | measure(forward, device)
        if reason := refusal(call.name):
            yield {'pass': 'bwd', 'refused by fla': reason}
        elif leaves:
            yield {'pass': 'bwd'} | measure(prepare(), device, prepare)


def measure(call: Callable[[], object], device: str, prepare: Callable[[], Callable] | None = None) -> dict:
    """Milliseconds: `kernels_ms` of the device alone, `ms` of an eager call, `graph_ms` of a call in a CUDA graph.

    `prepare` makes the call anew in the stream that is captured.
    """
    call()
    row: dict = {}
    timers = (('kernels_ms', kernels_ms), ('ms', eager_ms), ('graph_ms', graph_ms))
    for name, timer in timers if device != 'meta' else ():
        try:
            row[name] = timer(call, device if timer is eager_ms else prepare)
        except Exception as error:
            # a profile or a capture may not be had
            row[f'no {name}'] = describe_error(error)
    return row


def eager_ms(call: Callable[[], object], device: str) -> float:
    """The median between two events, with the L2 cache flushed before each call."""
    if device == 'meta':
        return 0.0
    from triton.testing import do_bench

    return do_bench(call, warmup=20, rep=100, return_mode='median')


def kernels_ms(call: Callable[[], object], prepare: Callable | None) -> float:
    """What the profiler sees of the device."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(PROFILED):
            call()
        torch.cuda.synchronize()
    total = sum(event.self_device_time_total for event in profiled.key_averages())
    if not total:
        raise RuntimeError('the profile has no time of the device')
    return total / PROFILED / 1e3


def graph_ms(call: Callable[[], object], prepare: Callable[[], Callable] | None) -> float:
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call = prepare() if prepare else call
        call()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(PROFILED):
            call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / PROFILED
