"""vLLM gives the tokens of `generate` in float32, however it schedules the requests."""

import pytest
from fla.models import GLAConfig
from transformers import AutoModelForCausalLM

from fla_longhorn import LonghornConfig, LonghornForCausalLM
from packages.serving.tests.checkpoints import GATED, SIZES, VARIANTS

# vLLM traces the model, and inductor does not compile it
TRACED = {'enforce_eager': False, 'compilation_config': {'backend': 'eager'}}


@pytest.mark.parametrize('name', ['paper', 'heads', 'exact-heads', 'hybrid', 'window', *GATED])
def test_decoded_tokens_take_one_loop(serve, monkeypatch, name):
    """Between a mixer's first and last projection; it has no projection of the values."""
    from fla_longhorn_serving.vllm import mixer

    found, mix = [], mixer.mix_tokens
    monkeypatch.setattr(mixer, 'mix_tokens', lambda *args: found.append(mix(*args)) or found[-1])
    assert serve(name)[0] == [True, True]
    assert bool(found) != VARIANTS[name].get('value_proj', False) and all(o is not None for o in found)


# with tensor parallelism, whole heads for each of two processes, or one head in two parts beside an attention layer
@pytest.mark.parametrize(('name', 'options'), [
    *((name, {}) for name in VARIANTS), ('heads', {'enforce_eager': False}),
    *((name, {'tensor_parallel_size': 2}) for name in ('heads', 'hybrid', 'gate-head', 'exact-gate-channel')),
    ('gate-channel', {'enforce_eager': False}),
    *((name, {'pipeline_parallel_size': 2, **TRACED}) for name in ('paper', 'window')),
], ids=str)
def test_batch(serve, name, options):
    assert serve(name, **options)[0] == [True, True]


@pytest.mark.parametrize('name', ['paper', 'exact-heads', 'hybrid', *GATED])
def test_prompts_in_pieces(serve, name):
    equal, steps, _ = serve(name, max_num_batched_tokens=32)
    assert equal == [True, True]
    assert max(sum(step.num_scheduled_tokens.values()) for step in steps) == 32


def test_more_requests_than_places(serve):
    equal, steps, _ = serve('heads', repeat=3, max_num_seqs=4)
    assert equal == [True, True]
    assert max(len(step.num_scheduled_tokens) for step in steps) == 4


def test_preemption_and_prefix_cache(serve):
    equal, steps, cached = serve('paper', repeat=2, enable_prefix_caching=True, block_size=32, num_gpu_blocks_override=9)
    assert equal == [True, True]
    assert any(step.preempted_req_ids for step in steps) and max(cached) >= 32


@pytest.mark.parametrize('name', ['paper', 'hybrid'])
def test_prefixes_are_cached(serve, name):
    """With no other option: of the prompt of 129 tokens a block of 128 is not read again."""
    equal, _, cached = serve(name, enable_prefix_caching=True)
    assert equal == [True, True]
    assert cached[-1] == 128


def test_longer_than_in_training(engine, variant):
    """A model without attention has no longest text; one with attention has that of its config."""
    assert engine(variant('paper').folder, max_model_len=4096).llm_engine.model_config.max_model_len == 4096
    with pytest.raises(ValueError, match='max_model_len'):
        engine(variant('hybrid').folder, max_model_len=4096)


def test_refused(engine, tmp_path):
    """A convolution that vLLM has no kernel for, and a family with Longhorn in it."""
    LonghornForCausalLM(LonghornConfig(**SIZES, conv_size=5)).save_pretrained(tmp_path / 'wide')
    with pytest.raises(ValueError, match='conv_size must be one of'):
        engine(tmp_path / 'wide')
    AutoModelForCausalLM.from_config(GLAConfig(**SIZES, attn_mode='longhorn')).save_pretrained(tmp_path / 'swapped')
    with pytest.raises(ValueError, match='GLAForCausalLM'):
        engine(tmp_path / 'swapped')
