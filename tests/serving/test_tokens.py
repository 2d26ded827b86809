"""vLLM gives the tokens of `generate` in float32, however it schedules the requests."""

import pytest

pytest.importorskip('vllm', reason='make test-serving has vLLM')

from vllm import SamplingParams  # noqa: E402

from tests.serving.checkpoints import NEW_TOKENS, VARIANTS, prompts  # noqa: E402


@pytest.fixture
def serve(engine, variant):
    """Serve a variant in two turns, so that pages are used again: returns whether all tokens were `generate`'s in each,
    the scheduler's steps, and how many tokens of each prompt of the last turn were cached."""
    def run(name: str, repeat: int = 1, **options) -> tuple[list[bool], list, list[int]]:
        checkpoint = variant(name)
        llm = engine(checkpoint.folder, **options)
        scheduler, steps, equal = llm.llm_engine.engine_core.engine_core.scheduler, [], []
        schedule = scheduler.schedule
        scheduler.schedule = lambda *a, **k: steps.append(schedule(*a, **k)) or steps[-1]
        sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
        for _ in range(2):
            out = llm.generate([{'prompt_token_ids': x} for x in prompts() * repeat], sampling, use_tqdm=False)
            equal.append([list(x.outputs[0].token_ids) for x in out] == checkpoint.tokens * repeat)
        return equal, steps, [x.num_cached_tokens for x in out]

    return run


@pytest.mark.parametrize('name', VARIANTS)
def test_batch(serve, name):
    assert serve(name)[0] == [True, True]


@pytest.mark.parametrize('name', ['paper', 'exact-heads', 'hybrid'])
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


def test_compiled(serve):
    assert serve('heads', enforce_eager=False)[0] == [True, True]
