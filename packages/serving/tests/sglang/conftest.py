"""SGLang's engine on the CPU, one after the other: eager, one thread, nothing fetched."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from packages.serving.tests import checkpoints
from tests import forks

# `make test-sglang` has SGLang
NEED_IT = {path.name for path in Path(__file__).parent.glob('test_*.py')} - {'test_entry_point.py'}
collect_ignore = [] if find_spec('sglang') else sorted(NEED_IT)
if not collect_ignore:
    stubs = str(Path(__file__).parent / 'stubs')
    sys.path.append(stubs)
    # processes of the engine inherit them
    os.environ.update(
        SGLANG_USE_CPU_ENGINE='1', HF_HUB_OFFLINE='1', OMP_NUM_THREADS='1',
        PYTHONPATH=os.pathsep.join([str(forks.ROOT), stubs]),
    )
OPTIONS = {
    'device': 'cpu', 'dtype': 'float32', 'skip_tokenizer_init': True, 'mem_fraction_static': 0.2, 'max_total_tokens': 4096,
    'max_mamba_cache_size': 8, 'max_running_requests': 8, 'context_length': 256, 'log_level': 'warning',
}
GREEDY = {'temperature': 0, 'max_new_tokens': checkpoints.NEW_TOKENS, 'ignore_eos': True}


@pytest.fixture(scope='session')
def engine():
    """An engine; it ends when one with other options starts."""
    from sglang.srt.entrypoints.engine import Engine

    running: dict = {}

    def start(folder, **options):
        wanted = OPTIONS | {'model_path': str(folder)} | options
        if running.get('options') != wanted:
            stop()
            running.update(options=wanted, engine=Engine(**wanted))
        return running['engine']

    def stop():
        if running:
            running['engine'].shutdown()
            running.clear()

    yield start
    stop()
