"""Triton on the device: the driver reports an H100, and kernels run in Triton's interpreter on the device's memory."""

from __future__ import annotations

import itertools
import os

from offgpu.pretend import binding, launches


def install() -> None:
    """Import Triton with its interpreter, then unset TRITON_INTERPRET, by which programs would dispatch to the CPU."""
    # Triton's own functions become interpreted ones when they are imported
    os.environ['TRITON_INTERPRET'] = '1'
    try:
        import triton
        # this sets the variable too
        triton.knobs.runtime.interpret = True
    finally:
        del os.environ['TRITON_INTERPRET']
    from offgpu.interpreter import make_faster
    from offgpu.pretend import interpreting

    triton.runtime.driver.set_active(Driver())
    run_on_device()
    make_faster()
    interpreting.patch()


class Utils:
    def get_device_properties(self, index: int = 0) -> dict[str, int]:
        found = binding.device_properties(index)
        return {
            'max_shared_mem': found.shared_memory_per_block_optin, 'max_num_regs': found.regs_per_multiprocessor,
            'multiprocessor_count': found.multi_processor_count, 'warpSize': found.warp_size,
            'sm_clock_rate': found.clock_rate, 'mem_clock_rate': found.memory_clock_rate,
            'mem_bus_width': found.memory_bus_width,
        }


class Driver:
    """The methods of triton.backends.nvidia.driver.CudaDriver that are used."""

    utils = Utils()
    benchmarks = itertools.count()

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget
        major, minor = binding.CAPABILITY
        return GPUTarget('cuda', 10 * major + minor, 32)

    def get_device_interface(self):
        import torch
        return torch.cuda

    def get_current_device(self) -> int:
        return self.get_device_interface().current_device()

    def set_current_device(self, device: int) -> None:
        self.get_device_interface().set_device(device)

    def get_current_stream(self, device: int = 0) -> int:
        return self.get_device_interface().current_stream(device).cuda_stream

    def get_active_torch_device(self):
        import torch
        return torch.device('cuda', self.get_current_device())

    def get_empty_cache_for_benchmark(self):
        import torch
        return torch.empty(1, device='cuda')

    def clear_cache(self, cache) -> None: ...

    def get_benchmarker(self):
        """Report each configuration as faster than the one before, so that the autotuner chooses the last.

        It tends to have the largest blocks, so the fewest to interpret.
        """
        return lambda call, quantiles=None, **kwargs: [-float(next(self.benchmarks))] * len(quantiles or [1])

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty


def on_host(x, name: str, current: int):
    """A kernel's argument on the host; its tensors must be on the current device, as a GPU needs them."""
    import torch
    from triton.runtime import interpreter

    if isinstance(x, tuple):
        return interpreter._tuple_create(x, [on_host(y, name, current) for y in x])
    if isinstance(x, interpreter.TensorDescriptor):
        base = on_host(x.base, name, current)
        return interpreter.TensorDescriptor(base, x.shape, x.strides, x.block_shape, x.padding, x.round_f32_to_tf32)
    if not hasattr(x, 'data_ptr'):
        return x
    if not x.is_cuda:
        raise ValueError(f'Pointer argument cannot be accessed from Triton (cpu tensor?): {name}')
    if x.device.index != current:
        raise ValueError(f'{name} is launched on cuda:{current} with a tensor on {x.device}')
    with torch.no_grad():
        return torch.ops.pretend.host(x)


def run_on_device() -> None:
    """Make launches use the tensors' memory; the interpreter would copy it to the host and back."""
    from triton.runtime import interpreter

    def launch(self, *args, **kwargs) -> None:
        import torch
        current, name = torch.cuda.current_device(), self.fn.__name__
        args = tuple(on_host(x, name, current) for x in args)
        kwargs = {key: on_host(x, name, current) for key, x in kwargs.items()}
        launches.note(name, self.grid if isinstance(self.grid, tuple) else None, lambda: run(self, *args, **kwargs))
        run(self, *args, **kwargs)

    executor = interpreter.GridExecutor
    run = executor.__call__
    executor.__call__ = launch
    executor._init_args_hst = lambda self, args, kwargs: (args, kwargs)
    executor._restore_args_dev = lambda self, *args: None
