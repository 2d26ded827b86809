"""Compile a Triton kernel for a GPU target without a GPU, disassemble it and count what its loops issue.

Only in a process without TRITON_INTERPRET: there `@triton.jit` makes kernels that don't compile.
"""

from __future__ import annotations

import collections
import os
import re
import subprocess
import tempfile
from dataclasses import dataclass, field

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGETS = {
    'sm_80': GPUTarget('cuda', 80, 32),
    'sm_90': GPUTarget('cuda', 90, 32),
    'sm_100': GPUTarget('cuda', 100, 32),
    'gfx942': GPUTarget('hip', 'gfx942', 64),
}


@dataclass
class Loop:
    """A loop of the compiled code: its instructions by name, inner loops not included, and how deep it lies."""

    mix: collections.Counter
    depth: int
    order: int

    @property
    def instructions(self) -> int:
        return sum(self.mix.values())


@dataclass
class Compiled:
    """What one target's code of a kernel holds; None where the target's tools don't tell."""

    registers: int | None
    spills: int | None
    shared_bytes: int
    mix: collections.Counter
    loops: list[Loop] = field(default_factory=list)

    def count(self, *names: str) -> int:
        return sum(n for name, n in self.mix.items() if name in names)


def compile_kernel(
    kernel, types: dict[str, str], constants: dict[str, object], target: str, num_warps: int, num_stages: int = 1,
    unaligned: tuple[str, ...] = (), **options: object,
) -> Compiled:
    """Compile `kernel` with arguments of `types` (Triton's names: '*bf16', 'i32'); all others are `constants`.

    Pointers are taken as aligned to 16 bytes, as fresh tensors are, but for those in `unaligned`. `kernel` may be wrapped in
    `triton.heuristics`; the flags that its heuristics compute must then be among the constants. `options` are Triton's.
    """
    while not hasattr(kernel, 'arg_names') or not hasattr(kernel, 'params'):
        kernel = kernel.fn
    names = kernel.arg_names
    missing = [name for name in names if name not in types and name not in constants]
    if missing:
        raise ValueError(f'{kernel.__name__}: no type or constant for {missing}')
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, 'constexpr') for name in names},
        constexprs={(i,): constants[name] for i, name in enumerate(names) if name not in types},
        attrs={
            (i,): [['tt.divisibility', 16]] for i, name in enumerate(names)
            if types.get(name, '').startswith('*') and name not in unaligned
        },
    )
    options |= dict(num_warps=num_warps, num_stages=num_stages)
    compiled = triton.compile(source, target=TARGETS[target], options=options)
    if 'cubin' in compiled.asm:
        return read_cubin(compiled.asm['cubin'], compiled.metadata.shared)
    return read_amdgcn(compiled.asm['amdgcn'], compiled.metadata.shared)


def read_cubin(cubin: bytes, shared: int) -> Compiled:
    tools = os.path.join(os.path.dirname(triton.__file__), 'backends', 'nvidia', 'bin')
    with tempfile.NamedTemporaryFile(suffix='.cubin') as file:
        file.write(cubin)
        file.flush()
        sass = run(os.path.join(tools, 'nvdisasm'), '-c', file.name)
        usage = run(os.path.join(tools, 'cuobjdump'), '--dump-resource-usage', file.name)
    labels, instructions = {}, []
    for line in sass.splitlines():
        if label := re.match(r'\s*(\.L_x_\d+):', line):
            labels[label[1]] = len(instructions)
        elif instruction := re.search(r'/\*[0-9a-f]{4,}\*/\s+(.*?);', line):
            instructions.append(re.sub(r'^@!?U?P[T\d]+\s+', '', instruction[1]))
    names = [text.split()[0].split('.')[0] for text in instructions]
    spans = []
    for i, text in enumerate(instructions):
        jump = re.search(r'BRA.*?(\.L_x_\d+)', text)
        # the code ends in a jump to itself
        if jump and labels.get(jump[1], i) < i:
            spans.append((labels[jump[1]], i))
    mix = collections.Counter(names)
    return Compiled(
        registers=int(re.search(r'REG:(\d+)', usage)[1]), spills=mix['LDL'] + mix['STL'], shared_bytes=shared, mix=mix,
        loops=own_loops(names, spans),
    )


def own_loops(names: list[str], spans: list[tuple[int, int]]) -> list[Loop]:
    """Each loop with its own instructions: an instruction belongs to the innermost loop around it."""
    spans = sorted(set(spans), key=lambda span: (span[0], -span[1]))
    owners = [None] * len(names)
    for i, (first, last) in sorted(enumerate(spans), key=lambda item: item[1][0] - item[1][1]):
        owners[first:last + 1] = [i] * (last + 1 - first)
    return [
        Loop(
            mix=collections.Counter(name for name, owner in zip(names, owners, strict=True) if owner == i),
            depth=sum(a <= first and last <= b for a, b in spans) - 1, order=i,
        )
        for i, (first, last) in enumerate(spans)
    ]


def read_amdgcn(assembly: str, shared: int) -> Compiled:
    def number(key):
        found = re.search(rf'\.{key}:\s+(\d+)', assembly)
        return None if found is None else int(found[1])

    names = re.findall(r'^\s+([a-z][a-z0-9]*_[a-z0-9_]+)', assembly, flags=re.MULTILINE)
    return Compiled(
        registers=number('vgpr_count'), spills=number('vgpr_spill_count'), shared_bytes=shared, mix=collections.Counter(names),
    )


def run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
