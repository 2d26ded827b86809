"""PTX text to instructions: opcode, operands, guard, and the source line that Triton records for it."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field


class Unsupported(NotImplementedError):
    """PTX that the emulator does not support."""


@dataclass(frozen=True)
class Register:
    name: str


@dataclass(frozen=True)
class Immediate:
    """A number as bits (`kind` 'f' float32, 'd' float64) or an integer."""

    value: int
    kind: str = 'i'


@dataclass(frozen=True)
class Address:
    """`[base + offset]`; base is a register or a symbol."""

    base: Register | str
    offset: int


@dataclass(frozen=True)
class Vector:
    items: tuple


@dataclass
class Instruction:
    opcode: tuple[str, ...]
    operands: list
    guard: Register | None
    negated: bool
    text: str
    line: str


@dataclass
class Kernel:
    name: str
    # (name, bytes) of the parameters, in order
    parameters: list[tuple[str, int]]
    threads: int
    # class prefix of register names to its width in bits, 1 for predicates
    widths: dict[str, int]
    instructions: list[Instruction]
    labels: dict[str, int] = field(default_factory=dict)
    local_bytes: int = 0


WIDTH = {'pred': 1, 'b8': 8, 'b16': 16, 'b32': 32, 'b64': 64, 'f32': 32, 'f64': 64}


def parse(ptx: str) -> Kernel:
    """The one kernel of a module that Triton made."""
    ptx = re.sub(r'/\*.*?\*/', '', ptx, flags=re.DOTALL)
    files = dict(re.findall(r'\.file\s+(\d+)\s+"([^"]*)"', ptx))
    ptx = re.sub(r'//.*', '', ptx)
    entry = re.search(r'\.visible\s+\.entry\s+([\w$]+)\s*\((.*?)\)(.*?)\{', ptx, flags=re.DOTALL)
    if entry is None:
        raise ValueError('PTX without an entry')
    name, declared, directives = entry.groups()
    parameters = [
        (found[2], int(found[1]) // 8)
        for found in re.finditer(r'\.param\s+\.[ubsf](\d+)\s+(?:\.ptr\s+\.\w+\s+\.align\s+\d+\s+)?([\w$]+)', declared)
    ]
    threads = re.search(r'\.reqntid\s+(\d+)', directives)
    if threads is None:
        raise ValueError(f'{name} does not say how many threads it has')
    depth, end = 1, entry.end()
    while depth:
        depth += {'{': 1, '}': -1}.get(ptx[end], 0)
        end += 1
    kernel = Kernel(name, parameters, int(threads[1]), {}, [])
    line, pending = '', ''
    locals_: list[tuple[re.Pattern, str]] = []
    for text in ptx[entry.end():end - 1].splitlines():
        text = text.strip()
        if not text:
            continue
        if not pending.strip('{} '):
            if found := re.match(r'\.loc\s+(\d+)\s+(\d+)', text):
                line = f'{files.get(found[1], "?").rsplit("/", 1)[-1]}:{found[2]}'
                continue
            if found := re.match(r'\.reg\s+\.(\w+)\s+(%\w+?)(?:<\d+>)?;', text):
                kernel.widths[found[2]] = WIDTH[found[1]]
                continue
            if found := re.match(r'\.local\s+.*?\[(\d+)\];', text):
                kernel.local_bytes = int(found[1])
                continue
            if re.match(r'\.(pragma|loc|file|section)', text):
                continue
            if found := re.match(r'([\w$]+):$', text):
                kernel.labels[found[1]] = len(kernel.instructions)
                continue
        pending = f'{pending} {text}'.strip()
        *done, pending = split_statements(pending)
        for statement in done:
            # braces are scopes of inline assembly with their own register names
            statement = statement.lstrip('{} ')
            if found := re.match(r'\.reg\s+\.(\w+)\s+(\w+)$', statement):
                kernel.widths[f'%{found[2]}'] = WIDTH[found[1]]
                local = re.compile(rf'(?<![%\w.]){found[2]}\b')
                locals_.append((local, f'%{found[2]}'))
                continue
            for local, name in locals_:
                statement = local.sub(name, statement)
            kernel.instructions.append(parse_instruction(statement, line))
    if pending.strip(' {}'):
        raise ValueError(f'left over after the last statement: {pending!r}')
    return kernel


def split_statements(text: str) -> list[str]:
    *done, rest = text.split(';')
    return [*(part.strip() for part in done if part.strip()), rest.strip()]


def parse_instruction(text: str, line: str) -> Instruction:
    found = re.match(r'(?:@(!?)(%?\w+)\s+)?([\w.:]+)\s*(.*)$', text, flags=re.DOTALL)
    if not found:
        raise ValueError(f'cannot parse {text!r}')
    negated, guard, opcode, operands = found.groups()
    # a block's own memory, which Triton 3.8 spells out
    opcode = opcode.replace('shared::cta', 'shared').replace('::', '__')
    return Instruction(
        opcode=tuple(opcode.split('.')), operands=[parse_operand(x) for x in split_operands(operands)],
        guard=Register(guard) if guard else None, negated=negated == '!', text=' '.join(text.split()), line=line,
    )


def split_operands(text: str) -> list[str]:
    parts, depth = [''], 0
    for c in text:
        depth += {'{': 1, '[': 1, '(': 1, '}': -1, ']': -1, ')': -1}.get(c, 0)
        if c == ',' and depth == 0:
            parts.append('')
        else:
            parts[-1] += c
    return [part.strip() for part in parts if part.strip()]


def parse_operand(text: str):
    if text.startswith('{'):
        return Vector(tuple(parse_operand(x) for x in split_operands(text[1:-1])))
    if text.startswith('['):
        found = re.match(r'\[\s*([%\w$.]+)\s*(?:\+\s*(-?\w+))?\s*\]$', text)
        if not found:
            raise ValueError(f'cannot parse the address {text!r}')
        base = Register(found[1]) if found[1].startswith('%') else found[1]
        return Address(base, int(found[2] or '0', 0))
    if '|' in text:
        return Vector(tuple(parse_operand(x.strip()) for x in text.split('|')))
    if found := re.match(r'0[fF]([0-9a-fA-F]{8})$', text):
        return Immediate(int(found[1], 16), 'f')
    if found := re.match(r'0[dD]([0-9a-fA-F]{16})$', text):
        return Immediate(int(found[1], 16), 'd')
    if re.match(r'-?(0[xX][0-9a-fA-F]+|\d+)U?$', text):
        return Immediate(int(text.rstrip('U'), 0))
    if text.startswith('%') or text == '_':
        return Register(text)
    return text


def float_of(x: Immediate) -> float:
    if x.kind == 'f':
        return struct.unpack('<f', struct.pack('<I', x.value))[0]
    if x.kind == 'd':
        return struct.unpack('<d', struct.pack('<Q', x.value))[0]
    return float(x.value)
