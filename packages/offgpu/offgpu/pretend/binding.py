"""CUDA's part of `torch._C`, which the CPU build lacks: with it, `torch.cuda`'s Python code runs as on a GPU.

An H100 of 80 GB. Streams and events have numbers and times but no effect: everything runs synchronously.
"""

from __future__ import annotations

import itertools
import os
import time
from types import ModuleType, SimpleNamespace
from typing import Any

from offgpu.pretend import launches, library

MULTIPROCESSORS = int(os.environ.get('PRETEND_SMS', '132'))
MEMORY = 80 * 2**30
CAPABILITY = 9, 0
SHARED_MEMORY = 232448
REGISTERS = 65536
# torch._C's number of the device type CUDA
CUDA = 1


class DeviceProperties(SimpleNamespace):
    """What `torch.cuda.get_device_properties` returns."""


def device_properties(device: int) -> DeviceProperties:
    return DeviceProperties(
        name='NVIDIA H100 80GB HBM3', major=CAPABILITY[0], minor=CAPABILITY[1], total_memory=MEMORY,
        multi_processor_count=MULTIPROCESSORS, warp_size=32, regs_per_multiprocessor=REGISTERS,
        max_threads_per_multi_processor=2048, max_threads_per_block=1024, shared_memory_per_block=49152,
        shared_memory_per_block_optin=SHARED_MEMORY, shared_memory_per_multiprocessor=SHARED_MEMORY + 1024,
        L2_cache_size=50 * 2**20, is_integrated=0, is_multi_gpu_board=0, gcnArchName='', clock_rate=1980000,
        memory_clock_rate=2619000, memory_bus_width=5120, uuid=f'pretend-{device}', pci_bus_id=device, pci_device_id=0,
        pci_domain_id=0,
    )


def provide(C: ModuleType) -> None:
    """Add the names to `torch._C` before `torch.cuda` looks for them."""
    for part in (devices(), streams(C), memory(), graphs()):
        for name, value in part.items():
            setattr(C, name, value)


def devices() -> dict[str, Any]:
    state = SimpleNamespace(initialized=False, forked=False)

    def _cuda_init() -> None:
        import torch
        state.initialized = True
        torch.cuda._get_device_properties = device_properties  # type: ignore[attr-defined]
        count = library.get().pretend_device_count()
        torch.cuda.default_generators = tuple(torch.ops.pretend.default_generator(i) for i in range(count))

    def after_fork() -> None:
        if state.initialized:
            state.forked = True
            library.get().pretend_set_forked()

    os.register_at_fork(after_in_child=after_fork)

    # a fork of a process that has used CUDA may not use it
    def _cuda_isInBadFork() -> bool:
        return state.forked

    def _cuda_getDeviceCount() -> int:
        return library.get().pretend_device_count()

    def _cuda_getDevice() -> int:
        return library.get().pretend_get_device()

    def _cuda_exchangeDevice(device: int) -> int:
        return -1 if device < 0 else library.get().pretend_exchange_device(device)

    # another function than that above: Dynamo takes one handler for each
    def _cuda_maybeExchangeDevice(device: int) -> int:
        return -1 if device < 0 else library.get().pretend_exchange_device(device)

    def _cuda_setDevice(device: int) -> None:
        if not 0 <= device < _cuda_getDeviceCount():
            raise RuntimeError('CUDA error: invalid device ordinal')
        library.get().pretend_exchange_device(device)

    def _cuda_synchronize() -> None:
        import torch
        torch.ops.pretend.synchronize('device')

    def _cuda_getArchFlags() -> str:
        return 'sm_{}{}'.format(*CAPABILITY)

    def _cuda_canDeviceAccessPeer(device: int, peer: int) -> bool:
        return True

    def _cuda_hasPrimaryContext(device: int) -> bool:
        return True

    def _cuda_ipc_collect() -> None: ...

    named = {name: value for name, value in locals().items() if name.startswith('_')}
    return named | {'_CudaDeviceProperties': DeviceProperties, '_has_cuda': True}


def streams(C: ModuleType) -> dict[str, Any]:
    numbers = itertools.count(1)

    class _CudaStreamBase(C.Stream):  # type: ignore[name-defined]
        cuda_stream = property(lambda self: self.stream_id)
        priority = 0

        def __new__(cls, priority=0, stream_id=None, device_index=None, device_type=CUDA, stream_ptr=0):
            index = library.get().pretend_get_device() if device_index is None else device_index
            number = next(numbers) if stream_id is None else stream_id
            return super().__new__(cls, stream_id=number, device_index=index, device_type=device_type)

        @staticmethod
        def priority_range() -> tuple[int, int]:
            return 0, -5

    class _CudaEventBase(C.Event):  # type: ignore[name-defined]
        cuda_event = property(lambda self: self.event_id)

        def __new__(cls, enable_timing=False, blocking=False, interprocess=False, external=False):
            return super().__new__(
                cls, device='cuda', enable_timing=enable_timing, blocking=blocking, interprocess=interprocess)

        def record(self, stream) -> None:
            super().record(stream)
            self.time = time.perf_counter()

        def synchronize(self) -> None:
            import torch
            torch.ops.pretend.synchronize('event')

        def elapsed_time(self, end) -> float:
            return max((end.time - self.time) * 1e3, 1e-3)

    def _cuda_getCurrentStream(device: int) -> tuple[int, int, int]:
        return library.get().pretend_get_stream(device), device, CUDA

    def _cuda_getDefaultStream(device: int) -> tuple[int, int, int]:
        return 0, device, CUDA

    def _cuda_getCurrentRawStream(device: int) -> int:
        return library.get().pretend_get_stream(device)

    def _cuda_setStream(stream_id: int, device_index: int, device_type: int) -> None:
        library.get().pretend_exchange_device(device_index)
        library.get().pretend_set_stream(device_index, stream_id)

    return {name: value for name, value in locals().items() if name.startswith('_')}


def memory() -> dict[str, Any]:
    def _cuda_memoryStats(device: int) -> dict[str, Any]:
        lib = library.get()
        used = {'current': lib.pretend_allocated(device), 'peak': lib.pretend_peak(device)}
        return {'allocated_bytes': {'all': used}, 'reserved_bytes': {'all': used}, 'num_alloc_retries': 0, 'num_ooms': 0}

    def _cuda_resetPeakMemoryStats(device: int) -> None:
        library.get().pretend_reset_peak(device)

    def _cuda_resetAccumulatedMemoryStats(device: int) -> None: ...

    def _cuda_emptyCache() -> None: ...

    def _host_emptyCache() -> None: ...

    def _cuda_getAllocatorBackend() -> str:
        return 'native'

    def free_and_total(device: int) -> tuple[int, int]:
        return MEMORY - library.get().pretend_allocated(device), MEMORY

    runtime = SimpleNamespace(
        cudaMemGetInfo=free_and_total, cudaError=SimpleNamespace(success=0), cudaProfilerStart=lambda: 0,
        cudaProfilerStop=lambda: 0,
    )
    named = {name: value for name, value in locals().items() if name.startswith('_')}
    return named | {'_cudart': runtime, '_cuda_CUDAAllocator_AllocatorState': SimpleNamespace}


def graphs() -> dict[str, Any]:
    pools = itertools.count(1)

    class _CUDAGraph:
        number: int | None
        pool_handle: tuple[int, int]

        def __new__(cls, keep_graph: bool = False):
            graph = super().__new__(cls)
            graph.number, graph.pool_handle = None, (0, next(pools))
            return graph

        def capture_begin(self, pool=None, capture_error_mode: str = 'global') -> None:
            self.reset()
            self.pool_handle = pool or self.pool_handle
            self.number = launches.begin_capture()

        def capture_end(self) -> None:
            launches.end_capture(self.number or 0)

        def replay(self) -> None:
            launches.replay(self.number)

        def reset(self) -> None:
            if self.number is not None:
                launches.drop(self.number)
                self.number = None

        def pool(self) -> tuple[int, int]:
            return self.pool_handle

        def instantiate(self) -> None: ...

        def register_generator_state(self, generator) -> None: ...

        def __del__(self) -> None:
            self.reset()

    def _graph_pool_handle() -> tuple[int, int]:
        return 0, next(pools)

    def _cuda_isCurrentStreamCapturing() -> bool:
        return bool(library.get().pretend_is_capturing())

    return {name: value for name, value in locals().items() if name.startswith('_')}
