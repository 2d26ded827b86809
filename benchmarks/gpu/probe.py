"""What PyTorch and Triton see of a device: the machine, or in a line why nothing can run on it."""

from __future__ import annotations

import json
import sys

import torch

from benchmarks.measure.machine import describe_machine


def probe(device: str) -> dict:
    try:
        if torch.device(device).type == 'cuda':
            assert (torch.ones(1, device=device) + 1).item() == 2, 'PyTorch adds 1 and 1 to something else than 2'
            launch_triton(device)
        return describe_machine(device)
    # a driver or a build that does not fit may raise anything
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        built = f'for CUDA {torch.version.cuda}' if torch.version.cuda else 'without CUDA'
        return {'error': f'PyTorch {torch.__version__}, built {built}, sees {torch.cuda.device_count()} GPUs: {reason}'[:400]}


def launch_triton(device: str) -> None:
    from benchmarks.gpu.loops import loop_kernel

    out = torch.empty(32, device=device)
    loop_kernel[(1,)](out, 0.5, 0, 0, N=256, W=1, num_warps=1)
    assert out[:2].tolist() == [28, 36], 'a kernel by Triton has wrong results'


def main(device: str) -> None:
    print(json.dumps(probe(device)))


if __name__ == '__main__':
    main(sys.argv[1])
