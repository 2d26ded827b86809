"""A stage that is planted with faults, for the tests of the run on a GPU."""

import os
import signal
import time

import triton
import triton.language as tl

FAULTS = ('raises', 'hangs', 'dies', 'prints', 'works')


@triton.jit
def planted_kernel(x):
    tl.store(x, 1.0)


def items(device):
    planted = {
        'waits': [f'waits {i}' for i in range(8)], 'compiles': ['compiles', 'works'],
    }
    return planted.get(os.environ.get('PLANTED'), [*FAULTS])


def run(item, device):
    yield {'begun': item}
    if item == 'raises':
        raise ValueError('the whole error,\nof several lines')
    if item == 'hangs':
        # a child that would go on
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.setpgid(0, os.getpgid(0))
        time.sleep(600)
    if item == 'dies':
        print('its last words', flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    if item == 'prints':
        # more than a pipe holds
        print('x' * 300_000, flush=True)
    if item == 'compiles':
        import torch

        from offgpu.launches import rehearsal

        with rehearsal('sm_80', 'code'):
            planted_kernel[(1,)](torch.empty(1, device='meta'))
    if item.startswith('waits'):
        time.sleep(0.05)
