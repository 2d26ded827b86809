"""`selfcheck --compile-only` compiles what a model launches: nothing is launched, and nothing is left to compile."""

from argparse import Namespace
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs

from benchmarks.operators import LonghornKernels
from fla_longhorn.models import LonghornConfig, LonghornForCausalLM
from fla_longhorn.selfcheck.compiling import compile_share, run_model
from offgpu.launches import rehearsal

META = torch.device('meta')
OPTIONS = dict(device=META, dtype=None, autocast=False, hidden_size=None, state_size=None, num_heads=None, exact=None)
# kernels of a training step and of decoding: fla's convolution and norm, and Longhorn's by update
OF_FLA = {
    'causal_conv1d_fwd_kernel', 'causal_conv1d_bwd_kernel', 'causal_conv1d_update_kernel', 'layer_norm_fwd_kernel',
    'layer_norm_bwd_kernel',
}
OF_UPDATE = {
    False: {'longhorn_prepare_kernel', 'longhorn_fwd_kernel', 'longhorn_bwd_kernel', 'longhorn_step_kernel'},
    True: {
        'chunk_longhorn_exact_fwd_kernel_o', 'chunk_longhorn_exact_bwd_kernel', 'chunk_longhorn_exact_bwd_kernel_qk',
        'fused_recurrent_longhorn_exact_fwd_kernel',
    },
}


@contextmanager
def compiled():
    """The names of kernels that Triton compiles."""
    names = []
    with knobs.runtime.scope():
        knobs.runtime.jit_post_compile_hook = lambda *, fn, **_: names.append(fn.name.rpartition('.')[2])
        yield names


def train_and_decode(model: LonghornForCausalLM, B: int, T: int) -> None:
    ids = torch.zeros(B, T, dtype=torch.int64, device=META)
    model.train()(ids, labels=ids).loss.backward()
    model.eval()
    with torch.no_grad():
        for prompt in (ids, ids[:, :5]):
            cache = model(prompt, use_cache=True).past_key_values
            model(ids[:, :1], past_key_values=cache, use_cache=True)


@pytest.mark.parametrize('exact', [False, True], ids=['diagonal', 'exact'])
def test_a_step_compiles_nothing_more(exact, tmp_path):
    """Of a model with more layers. At another length and batch size, Longhorn's compile nothing more, and some of fla's do."""
    config = LonghornConfig(
        hidden_size=256, exact=exact, num_hidden_layers=2, vocab_size=64, fuse_cross_entropy=False, conv_bias=exact,
    )
    config.save_pretrained(tmp_path / 'config')
    (tmp_path / 'claims').mkdir()
    options = Namespace(**OPTIONS, config=tmp_path / 'config', batch_size=8, seq_len=2048)
    # no other test launches on this card without compiling, whose kernels would be there
    with rehearsal('sm_89', 'launch') as launches, LonghornKernels():
        with compiled() as names:
            compile_share(tmp_path / 'claims', lambda: run_model(options))
        assert not launches and len(names) == len([*(tmp_path / 'claims').iterdir()])
        assert OF_UPDATE[exact] <= {*names}
        with META:
            model = LonghornForCausalLM(config).bfloat16()
        with compiled() as more:
            train_and_decode(model, 8, 2048)
        assert {x.kernel for x in launches} >= OF_FLA | OF_UPDATE[exact]
        assert not more
        with compiled() as more:
            train_and_decode(model, 16, 4096)
    assert {*more} <= OF_FLA


@triton.autotune([triton.Config({'B': B}) for B in (16, 32)], key=['N'])
@triton.jit
def tuned(x, N, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(x + at, B, mask=at < N)


@triton.jit
def plain(x):
    tl.store(x, 1.0)


def launch_both():
    x = torch.empty(64, dtype=torch.float32, device='meta')
    tuned[(1,)](x, 64)
    plain[(1,)](x)


def test_processes_share_the_work(tmp_path):
    """All configurations are compiled, once, into Triton's cache; what another process has begun is passed over."""
    caches = [kernel.device_caches for kernel in (tuned.fn, plain)]
    with rehearsal('sm_80', 'code') as launches, knobs.cache.scope():
        for claims, folder, wanted in (
            ('one', 'filled', {'tuned': 2, 'plain': 1}), ('one', 'empty', {}), ('another', 'filled', {}),
        ):
            knobs.cache.dir = str(tmp_path / folder)
            for cache in caches:
                cache.clear()
            (tmp_path / claims).mkdir(exist_ok=True)
            assert compile_share(Path(tmp_path, claims), launch_both) == wanted
        with compiled() as names:
            launch_both()
        assert not launches[2:] and {x.kernel for x in launches} == {'tuned', 'plain'} and not names
