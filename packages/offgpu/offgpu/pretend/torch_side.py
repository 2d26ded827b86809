"""Changes in torch after its import."""

from __future__ import annotations

import os
from types import ModuleType

from offgpu.pretend import counting


def patch(torch: ModuleType) -> None:
    counting.listen()
    if os.environ.get('PRETEND_VERSION', '1') == '1':
        torch.version.cuda = '12.8'
    make_storages(torch)
    compile_eagerly(torch)


def make_storages(torch: ModuleType) -> None:
    """The CPU build cannot create storages on a CUDA device."""
    new = torch.UntypedStorage.__new__

    def make(cls, *args, device=None, **kwargs):
        if device is None:
            return new(cls, *args, **kwargs)
        if torch.device(device).type == 'cuda' and len(args) == 1 and isinstance(args[0], int):
            return torch.empty(args[0], dtype=torch.uint8, device=device).untyped_storage()
        return new(cls, *args, device=device, **kwargs)

    torch.UntypedStorage.__new__ = make


def compile_eagerly(torch: ModuleType) -> None:
    """Run graphs operator by operator; Inductor would compile for a GPU."""
    def run(self, model, inputs):
        from torch._dynamo.backends.debugging import aot_eager
        return aot_eager(model, inputs)

    torch._TorchCompileInductorWrapper.__call__ = run
