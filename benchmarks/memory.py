"""Memory of a layer's training step and of its cache: counted, so the same on any device.

    python -m benchmarks memory [--json FILE]

The layers of a 1.3B model run on meta tensors as on a GPU: Triton's launches are captured, live tensors are counted. Bytes are
per token and unit of the model's width, in bfloat16. `kept` is what backward needs, including the layer's input. `peak` is the
most that a step takes, with the layer's output and gradients but without parameters and theirs. `moved` is the least that its
operations read and write, weights included: an operation counts each of its tensors once. `scratch` is the most that the
operator's own backward takes beside its arguments and results.
"""

from __future__ import annotations

import argparse
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import fla_longhorn  # noqa: F401  before fla, whose warnings that there is no GPU it filters

# isort: split
import torch
import torch.nn as nn
from fla.layers import DeltaNet, GatedDeltaNet, GatedLinearAttention, KimiDeltaAttention
from fla.models.utils import Cache
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.measure import timing
from benchmarks.operators import KERNELS, launching_modules
from benchmarks.predict.calls import Shape, empty, longhorn_backward
from fla_longhorn.layers import Longhorn
from offgpu.launches import Launch, rehearsal

WIDTH, B, T = 2048, 8, 2048
STATE_SIZES = (16, 32, 64, 128)


class SoftmaxAttention(nn.Module):
    """Causal attention of 16 heads by PyTorch's flash kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.o_proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        q, k, v = (y.unflatten(-1, (16, -1)).transpose(1, 2) for y in self.qkv_proj(x).chunk(3, -1))
        o = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, is_causal=True)[0]
        return (self.o_proj(o.transpose(1, 2).flatten(-2)),)


def longhorn(**options: Any) -> Callable[[], nn.Module]:
    return lambda: Longhorn(hidden_size=WIDTH, layer_idx=0, **options)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    'Longhorn': longhorn(),
    'Longhorn, recompute=False': longhorn(recompute=False),
    'Longhorn exact': longhorn(exact=True),
    'Longhorn exact, recompute=False': longhorn(exact=True, recompute=False),
    'Longhorn exact, K = 64': longhorn(exact=True, state_size=64),
    'Longhorn exact, K = 128': longhorn(exact=True, state_size=128),
    'GLA': lambda: GatedLinearAttention(hidden_size=WIDTH, num_heads=16, layer_idx=0),
    'DeltaNet': lambda: DeltaNet(hidden_size=WIDTH, num_heads=16, layer_idx=0),
    'Gated DeltaNet': lambda: GatedDeltaNet(hidden_size=WIDTH, num_heads=6, layer_idx=0),
    'KDA': lambda: KimiDeltaAttention(hidden_size=WIDTH, num_heads=16, layer_idx=0),
    'softmax attention': SoftmaxAttention,
}


def mamba(state_size: int = 16, expand: int = 2, conv_size: int = 4) -> dict[str, float]:
    """Mamba: what `MambaInnerFn` of mamba_ssm (`ops/selective_scan_interface.py`) saves at its checkpoint_lvl 1.

    By its source; nothing of it runs here. Per channel: x and z, the scan's output before the gate, and its states every 2,048
    tokens, in float32 with their decays. Per token: the layer's input, the rank of delta, and B and C, the latter also as
    copies. The cache is what `Mamba.allocate_inference_cache` makes.
    """
    channels, rank = expand * WIDTH, WIDTH // 16
    of_channels = 2 * 2 + 2 + 2 * state_size * 4 / 2048
    kept = (of_channels * channels + 2 * (rank + 4 * state_size) + 2 * WIDTH) / WIDTH
    return {'kept': round(kept, 2), 'cache': 2 * channels * (state_size + conv_size)}


def mamba2(state_size: int = 128, head_dim: int = 64, expand: int = 2, conv_size: int = 4) -> dict[str, float]:
    """Mamba-2: what `MambaSplitConv1dScanCombinedFn` of mamba_ssm (`ops/triton/ssd_combined.py`) saves.

    Per token: the layer's input, all of `in_proj`'s output (z, x, B, C, and one step size per head), the scan's output before
    the norm, and the norm's factor in float32. The convolution, the chunks' states and the normed output are recomputed. The
    cache is what `Mamba2.allocate_inference_cache` makes.
    """
    channels = expand * WIDTH
    projected = 2 * channels + 2 * state_size + channels // head_dim
    kept = (2 * (WIDTH + projected + channels) + 4) / WIDTH
    return {'kept': round(kept, 2), 'cache': 2 * (channels * state_size + (channels + 2 * state_size) * conv_size)}


BY_SOURCE = {'Mamba, by its source': mamba, 'Mamba-2, by its source': mamba2}


aten = torch.ops.aten
# neither read nor write, and are no views by their schema
MOVE_NOTHING = (aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided, aten._unsafe_view)


def tensors(tree: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


class Memory(TorchDispatchMode):
    """Counts the bytes of live tensors made since, and those that operations read and write.

    Args:
        launches: The launches of a rehearsal; dropped, because they hold their tensors.
        known: Tensors that are not counted.
    """

    def __init__(self, launches: list[Launch], known: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.launches = launches
        self.now = self.peak = self.moved = 0
        # tensors that our operator's kernels moved: a kernel launched for several slices moves each once
        self.places: set[tuple] | None = None
        self.known = {x.untyped_storage()._cdata for x in known}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.drop_launches()
        if function in KERNELS:
            self.places = set()
            with self:
                results = KERNELS[function](*args)
                self.drop_launches()
            self.places = None
            return results
        out = function(*args, **(kwargs or {}))
        results = tensors(out)
        for x in results:
            self.note(x.untyped_storage())
        if not (function.is_view or function.overloadpacket in MOVE_NOTHING):
            places = {(x.untyped_storage()._cdata, x.storage_offset()): x.nbytes for x in [*results, *tensors((args, kwargs))]}
            self.moved += sum(places.values())
        return out

    def drop_launches(self) -> None:
        for launch in self.launches:
            # of an autotuned kernel's launches, count one
            if not launch.choice:
                tensors = [a for a in launch.arguments if a.tensor is not None]
                places = {(launch.kernel, a.storage, a.offset): a.nbytes for a in tensors}
                self.moved += sum(n for place, n in places.items() if place not in (self.places or ()))
                if self.places is not None:
                    self.places.update(places)
        self.launches.clear()

    def note(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self.known:
            return
        self.known.add(storage._cdata)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self.forget, storage._cdata, storage.nbytes())

    def forget(self, address: int, nbytes: int) -> None:
        self.known.discard(address)
        self.now -= nbytes


def training(make: Callable[[], nn.Module]) -> dict[str, float]:
    with rehearsal('sm_90', 'launch') as launches, launching_modules():
        with torch.device('meta'):
            layer = make().bfloat16()
        for p in layer.parameters():
            p.grad = torch.empty_like(p)
        own = [*layer.parameters(), *layer.buffers(), *(p.grad for p in layer.parameters())]
        with Memory(launches, own) as memory:
            h = empty(B, T, WIDTH).requires_grad_()
            o = layer(h)[0]
            memory.drop_launches()
            kept = memory.now - o.nbytes
            o.backward(torch.empty_like(o))
            memory.drop_launches()
    return {
        name: round(n / (B * T * WIDTH), 2) for name, n in (('kept', kept), ('peak', memory.peak), ('moved', memory.moved))
    }


def scratch(exact: bool, K: int) -> float:
    """Scratch bytes of backward per token and channel of the mixer, as the layer calls the operator."""
    with rehearsal('sm_90', 'launch') as launches:
        backward = longhorn_backward(Shape(B, T, 2 * WIDTH, K), exact)(T)
        with Memory(launches) as memory:
            gradients = backward()
        launches.clear()
    return round((memory.peak - sum(x.nbytes for x in gradients if x is not None)) / (B * T * 2 * WIDTH), 2)


def cache_bytes(make: Callable[[], nn.Module], tokens: int) -> int:
    """Bytes per sequence, in bfloat16 except for what a layer keeps in float32."""
    with rehearsal('sm_90', 'launch'), launching_modules(), torch.device('meta'), torch.no_grad():
        cache = Cache()
        make().bfloat16()(empty(1, tokens, WIDTH), past_key_values=cache, use_cache=True)
    return sum(x.nbytes for x in tree_leaves(dict(cache[0])) if isinstance(x, torch.Tensor))


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog='python -m benchmarks memory', description=(__doc__ or '').splitlines()[0])
    parser.add_argument('--json', type=timing.report_file, metavar='FILE', help='file for the rows')
    options = parser.parse_args(args)
    rows = []
    print('Bytes per token and unit of the width: kept for backward, the peak of a step, read and written (moved) by it.\n')
    print('| layer | kept | peak | moved | cache of a sequence, KiB |\n| --- | --- | --- | --- | --- |')
    for name, make in LAYERS.items():
        row: dict[str, Any] = {'layer': name, **training(make)}
        # keys and values of each token in bfloat16
        row['cache'] = 2 * 2 * WIDTH * T if make is SoftmaxAttention else cache_bytes(make, T)
        rows.append(row)
        counted = ' | '.join(f'{row[x]:.1f}' for x in ('kept', 'peak', 'moved'))
        print(f'| {name} | {counted} | {row["cache"] / 1024:.0f} |', flush=True)
    for name, count in BY_SOURCE.items():
        row = {'layer': name, 'peak': None, 'moved': None, **count()}
        rows.append(row)
        print(f'| {name} | {row["kept"]:.1f} | | | {row["cache"] / 1024:.0f} |')
    print('\nBytes per token and channel that the backward of the operator takes beside its arguments and results.\n')
    print('| K | scratch of the diagonal backward | of the exact |\n| --- | --- | --- |')
    scratches = [{'K': K, 'diagonal': scratch(False, K), 'exact': scratch(True, K)} for K in STATE_SIZES]
    for x in scratches:
        print(f'| {x["K"]} | {x["diagonal"]:.2f} | {x["exact"]:.2f} |')
    if options.json:
        timing.write_report(
            {'width': WIDTH, 'batch_size': B, 'tokens': T, 'rows': rows, 'scratch': scratches}, options.json,
        )
        print(f'\nwritten to {options.json}')
