"""vLLM in this process, one engine after the other: eager, one thread, nothing fetched."""

import gc
import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from packages.serving.tests import checkpoints

# `make test-serving` has vLLM
NEED_IT = {path.name for path in Path(__file__).parent.glob('test_*.py')} - {'test_register.py'}
collect_ignore = [] if find_spec('vllm') else sorted(NEED_IT)
if not collect_ignore:
    # it reads them when it is imported
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING='0', VLLM_CPU_KVCACHE_SPACE='1', VLLM_NO_USAGE_STATS='1', HF_HUB_OFFLINE='1',
        OMP_NUM_THREADS='1', VLLM_LOGGING_LEVEL='WARNING', VLLM_CPU_OMP_THREADS_BIND='nobind',
    )


@pytest.fixture
def engine():
    """An engine of vLLM in this process, which ends with the test."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.platforms import current_platform

    # vLLM looks at all modules there since 0.31, and fails at llvmlite's where Numba has been imported: before that, and once
    platform = type(current_platform)
    if hasattr(platform, 'register_triton_kernel_overrides') and not hasattr(platform, 'has_overrides'):
        platform.register_triton_kernel_overrides()
        platform.has_overrides, platform.register_triton_kernel_overrides = True, classmethod(lambda cls: None)

    def start(folder, **options) -> LLM:
        return LLM(str(folder), **{**checkpoints.OPTIONS, 'seed': 0, **options})

    yield start
    gc.collect()
    cleanup_dist_env_and_memory()


@pytest.fixture
def serve(engine, variant):
    """Serve a variant in two turns, so that pages are used again: returns whether all tokens were `generate`'s in each,
    the scheduler's steps, and how many tokens of each prompt of the last turn were cached."""
    from vllm import SamplingParams

    def run(name: str, repeat: int = 1, **options) -> tuple[list[bool], list, list[int]]:
        checkpoint = variant(name)
        llm = engine(checkpoint.folder, **options)
        scheduler, steps, equal = llm.llm_engine.engine_core.engine_core.scheduler, [], []
        schedule = scheduler.schedule
        scheduler.schedule = lambda *a, **k: steps.append(schedule(*a, **k)) or steps[-1]
        sampling = SamplingParams(temperature=0, max_tokens=checkpoints.NEW_TOKENS, ignore_eos=True, detokenize=False)
        for _ in range(2):
            out = llm.generate([{'prompt_token_ids': x} for x in checkpoints.prompts() * repeat], sampling, use_tqdm=False)
            equal.append([list(x.outputs[0].token_ids) for x in out] == checkpoint.tokens * repeat)
        return equal, steps, [x.num_cached_tokens for x in out]

    return run
