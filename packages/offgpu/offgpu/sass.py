"""Read a cubin: every SASS instruction with its operands and its scheduling control bits.

An instruction of Volta and later has 128 bits. Bits 105 to 125 control issue: stall count 105-108, yield 109, write
barrier 110-112, read barrier 113-115 (7: none), wait mask 116-121, register reuse 122-125. (Layout: maxas, turingas and
CuAssembler. nvdisasm prints reuse as `.reuse`.)
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from functools import cached_property

import triton


@dataclass
class Instruction:
    """One instruction: `op` with its suffixes, `args` as printed, and its control bits; `target` is a branch's index."""

    index: int
    address: int
    guard: str
    op: str
    args: list[str]
    stall: int = 0
    write_barrier: int | None = None
    read_barrier: int | None = None
    wait: int = 0
    target: int | None = None

    @cached_property
    def base(self) -> str:
        return self.op.split('.')[0]

    @cached_property
    def parts(self) -> frozenset[str]:
        return frozenset(self.op.split('.')[1:])

    @property
    def width(self) -> int:
        """Bytes per lane that a load or a store moves."""
        return next((n for suffix, n in WIDTHS if suffix in self.parts), 4)

    def control(self, word: int) -> None:
        bits = word >> 41
        write, read = bits >> 5 & 7, bits >> 8 & 7
        self.stall, self.wait = bits & 15, bits >> 11 & 63
        self.write_barrier, self.read_barrier = (None if b == 7 else b for b in (write, read))


WIDTHS = (('128', 16), ('64', 8), ('U16', 2), ('S16', 2), ('U8', 1), ('S8', 1), ('16', 2), ('8', 1))


@dataclass
class Program:
    """A kernel's code and resources."""

    name: str
    code: list[Instruction]
    registers: int
    by_address: dict[int, int] = field(default_factory=dict)

    @property
    def spills(self) -> int:
        return sum(x.base in ('LDL', 'STL') for x in self.code)


LINE = re.compile(r'/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P[T\d]+)\s+)?(\S+)\s*(.*?)\s*;\s*/\* (0x[0-9a-f]{16}) \*/')
SECOND = re.compile(r'^\s*/\* (0x[0-9a-f]{16}) \*/')


def tool(name: str) -> str:
    """The path of one of the CUDA tools that come with Triton."""
    return os.path.join(os.path.dirname(triton.__file__), 'backends', 'nvidia', 'bin', name)


def run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def split_args(text: str) -> list[str]:
    """Split at commas that are not inside brackets."""
    out, depth, start = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in '[({') - (c in '])}')
        if c == ',' and depth == 0:
            out.append(text[start:i].strip())
            start = i + 1
    last = text[start:].strip()
    return out + [last] if last else out


def read_cubin(cubin: bytes) -> Program:
    with tempfile.NamedTemporaryFile(suffix='.cubin') as file:
        file.write(cubin)
        file.flush()
        text = run(tool('nvdisasm'), '-hex', '-c', file.name)
        usage = run(tool('cuobjdump'), '--dump-resource-usage', file.name)
    name = re.search(r'\.text\.(\S+?):', text)[1]
    code, labels, pending = [], {}, None
    for line in text.splitlines():
        if label := re.match(r'\s*(\.L_x_\d+|\$\S+|\w\S*):\s*$', line):
            labels[label[1]] = len(code)
        elif m := LINE.search(line):
            pending = Instruction(len(code), int(m[1], 16), m[2] or '', m[3].rstrip(';'), split_args(m[4]))
        elif (m := SECOND.match(line)) and pending is not None:
            pending.control(int(m[1], 16))
            code.append(pending)
            pending = None
    for x in code:
        for arg in x.args:
            if m := re.search(r'`\((.+?)\)', arg):
                x.target = labels.get(m[1])
    return Program(name, code, int(re.search(r'REG:(\d+)', usage)[1]), {x.address: x.index for x in code})
