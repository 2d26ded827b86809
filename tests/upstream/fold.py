"""A module without what a patch lacks: branches that are never taken, and parameters that only they read.

Partial evaluation of source text by its syntax tree: comments, layout and names of what stays are as they were.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, product
from textwrap import fill


@dataclass(frozen=True)
class Facts:
    """What is true of every call in the tree."""

    # a condition, or a function of one -> its value, or another condition that is the same
    conditions: dict[str, bool | str] = field(default_factory=dict)
    # parameters and variables that nothing reads then; functions whose `**` adds such arguments
    gone: frozenset[str] = frozenset()
    # a variable -> the expression in its place
    values: dict[str, str] = field(default_factory=dict)
    # functions and classes that the tree lacks, and arguments of public ones: tests that name them are left out
    absent: frozenset[str] = frozenset()
    # sentences of docstrings and comments that match speak of what is gone
    unsaid: str = '(?!)'

    def __or__(self, other: Facts) -> Facts:
        return Facts(
            self.conditions | other.conditions, self.gone | other.gone, self.values | other.values,
            self.absent | other.absent, f'{self.unsaid}|{other.unsaid}',
        )

    def decide(self, test: ast.expr, known: tuple[tuple[ast.expr, bool], ...] = ()) -> bool | None:
        """The value of a condition, given others; None if it depends on the call."""
        atoms: list[str] = []
        for node in (test, *(x for x, _ in known)):
            self.evaluate(node, None, atoms)
        free = sorted(set(atoms))
        found = set()
        for values in product((False, True), repeat=min(len(free), 10)):
            assigned = dict(zip(free, values, strict=False))
            if all(self.evaluate(x, assigned) == value for x, value in known):
                found.add(self.evaluate(test, assigned))
        return found.pop() if len(found) == 1 else None

    def evaluate(self, node: ast.expr, assigned: dict[str, bool] | None, atoms: list[str] | None = None) -> bool:
        if isinstance(node, ast.BoolOp):
            values = [self.evaluate(x, assigned, atoms) for x in node.values]
            return all(values) if isinstance(node.op, ast.And) else any(values)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return not self.evaluate(node.operand, assigned, atoms)
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.IsNot):
            return not self.evaluate(ast.Compare(node.left, [ast.Is()], node.comparators), assigned, atoms)
        if isinstance(node, ast.Constant):
            return bool(node.value)
        text = ast.unparse(node)
        # of a call whatever its arguments
        fact = self.conditions.get(f'{ast.unparse(node.func)}()' if isinstance(node, ast.Call) else text)
        if isinstance(fact, bool):
            return fact
        if isinstance(fact, str):
            return self.evaluate(ast.parse(fact, mode='eval').body, assigned, atoms)
        if atoms is not None:
            atoms.append(text)
        return assigned is not None and assigned.get(text, False)


class Folded:
    """A module's text, of which characters are deleted and replaced by their places."""

    def __init__(self, text: str, facts: Facts) -> None:
        if not text.isascii():
            raise ValueError('places are counted in bytes, so the text must be ASCII')
        self.text, self.facts = text, facts
        self.starts = [0, *(found.end() for found in re.finditer('\n', text))]
        self.deleted = [False] * (len(text) + 1)
        self.inserted: dict[int, str] = {}
        for node in ast.parse(text).body:
            self.visit(node, ())

    def __str__(self) -> str:
        pieces = (self.inserted.get(i, '') + ('' if self.deleted[i] else x) for i, x in enumerate(self.text))
        return re.sub(r'\n{4,}', '\n\n\n', ''.join(pieces))

    def at(self, line: int, column: int = 0) -> int:
        return self.starts[line - 1] + column

    def place(self, node: ast.AST) -> tuple[int, int]:
        return self.at(node.lineno, node.col_offset), self.at(node.end_lineno, node.end_col_offset)  # type: ignore

    def operand(self, node: ast.AST) -> tuple[int, int]:
        """Its place with the brackets around it."""
        start, end = self.place(node)
        while self.text[start - 1] == '(' and self.text[end] == ')':
            start, end = start - 1, end + 1
        return start, end

    def delete(self, start: int, end: int) -> None:
        self.deleted[start:end] = [True] * (end - start)

    def replace(self, node: ast.AST, text: str) -> None:
        start, end = self.place(node)
        self.delete(start, end)
        self.inserted[start] = text

    def line(self, number: int) -> str:
        return self.text[self.at(number):self.at(number + 1)] if number < len(self.starts) else self.text[self.at(number):]

    def delete_lines(self, first: int, last: int, with_comment: bool = False) -> None:
        """With the comments above, which say why."""
        while with_comment and self.line(first - 1).lstrip().startswith('#'):
            first -= 1
        self.delete(self.at(first), self.at(last + 1))

    def dedent(self, first: int, last: int) -> None:
        for number in range(first, last + 1):
            if not self.line(number).isspace():
                # one level deeper than what is deleted already
                start = self.at(number)
                while self.deleted[start]:
                    start += 1
                self.delete(start, start + 4)

    def visit(self, node: ast.AST, known: tuple[tuple[ast.expr, bool], ...]) -> None:
        if isinstance(node, ast.If):
            self.fold_if(node, known)
        elif isinstance(node, ast.IfExp) and (value := self.facts.decide(node.test, known)) is not None:
            chosen = node.body if value else node.orelse
            (start, end), (first, last) = self.place(node), self.place(chosen)
            self.delete(start, first)
            self.delete(last, end)
            self.visit(chosen, known)
        elif isinstance(node, ast.JoinedStr):
            # places in it are wrong before Python 3.12
            return
        elif isinstance(node, ast.Assign) and (name := ast.unparse(node.targets[0])) in self.facts.values:
            self.replace(node.value, self.facts.values[name])
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)) and self.is_absent(node):
            self.delete_lines(min(x.lineno for x in (node, *node.decorator_list)), node.end_lineno or 0, with_comment=True)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and self.is_gone(node):
            self.delete_lines(node.lineno, node.end_lineno or 0, with_comment=True)
        elif isinstance(node, ast.BoolOp):
            self.simplify(node, known)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in self.facts.values:
            self.replace(node, self.facts.values[node.id])
        elif isinstance(node, ast.Name) and isinstance(self.facts.conditions.get(node.id), bool):
            self.replace(node, str(self.facts.conditions[node.id]))
        else:
            if isinstance(node, ast.Call):
                self.drop([*node.args, *node.keywords])
            if isinstance(node, ast.FunctionDef):
                self.drop([*node.args.args, *node.args.kwonlyargs])
                for decorator in node.decorator_list:
                    # `parametrize`
                    if getattr(next(iter(getattr(decorator, 'args', ())), None), 'value', None) in self.facts.gone:
                        self.delete_lines(decorator.lineno, decorator.end_lineno or 0)
            if isinstance(node, ast.List):
                self.drop_elements(node.elts, node.elts)
            if isinstance(node, ast.Dict):
                self.drop_elements(node.keys, node.values)
            for child in ast.iter_child_nodes(node):
                start, _ = self.place(child) if hasattr(child, 'lineno') else (len(self.text), 0)
                if not self.deleted[start]:
                    self.visit(child, known)

    def is_gone(self, node: ast.Assign | ast.AnnAssign) -> bool:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        # of a variable, or an attribute of `self`
        names = [ast.unparse(x).removeprefix('self.') for x in targets if isinstance(x, (ast.Name, ast.Attribute))]
        known = (x in self.facts.gone or isinstance(self.facts.conditions.get(x), bool) for x in names)
        return len(names) == len(targets) and all(known)

    def is_absent(self, node: ast.FunctionDef | ast.ClassDef) -> bool:
        names = {node.name}
        if node.name.startswith('test_'):
            names |= {getattr(x, 'id', None) or getattr(x, 'arg', None) for x in ast.walk(node)}
        return not names.isdisjoint(self.facts.absent)

    def fold_if(self, node: ast.If, known: tuple[tuple[ast.expr, bool], ...]) -> None:
        value = self.facts.decide(node.test, known)
        is_elif = self.text.startswith('elif', self.place(node)[0])
        header, body_end, end = node.test.end_lineno or 0, node.body[-1].end_lineno or 0, node.end_lineno or 0
        # the line `else:` or `elif ...:`
        other = body_end + 1
        while node.orelse and not re.match(r' *(else:|elif )', self.line(other)):
            other += 1
        has_elif = bool(node.orelse) and self.line(other).lstrip().startswith('elif')
        if value is True:
            if is_elif:
                self.delete_lines(node.lineno, header)
                self.inserted[self.at(node.lineno)] = ' ' * node.col_offset + 'else:\n'
            else:
                self.delete_lines(node.lineno, header)
                self.dedent(header + 1, body_end)
            self.delete(self.at(body_end + 1), self.at(end + 1))
        elif value is False and not node.orelse:
            self.delete_lines(node.lineno, end, with_comment=True)
        elif value is False:
            self.delete_lines(node.lineno, other - 1)
            if has_elif and not is_elif:
                # it becomes the first `if`
                self.delete(self.at(other, node.col_offset), self.at(other, node.col_offset + 2))
            elif not has_elif and not is_elif:
                self.delete_lines(other, other)
                self.dedent(other + 1, end)
        if value is None:
            self.visit(node.test, known)
        if value is not False:
            for child in node.body:
                self.visit(child, (*known, (node.test, True)))
        if value is not True:
            for child in node.orelse:
                self.visit(child, (*known, (node.test, False)))

    def simplify(self, node: ast.BoolOp, known: tuple[tuple[ast.expr, bool], ...]) -> None:
        """Delete operands that do not matter."""
        without = isinstance(node.op, ast.And)
        # a constant is no condition
        left = [x for x in node.values if isinstance(x, ast.Constant) or self.facts.decide(x, known) is not without]
        start, end = self.place(node)
        if len(left) == 1 and re.fullmatch(r'\W\(.*\)', self.text[start - 2:end + 1], re.S):
            self.delete(start - 1, start)
            self.delete(end, end + 1)
        for i, x in enumerate(node.values):
            if x in left:
                self.visit(x, known)
            elif i + 1 < len(node.values) and not any(y in left for y in node.values[:i]):
                self.delete(self.operand(x)[0], self.operand(node.values[i + 1])[0])
            else:
                self.delete(self.operand(node.values[i - 1])[1], self.operand(x)[1])

    def drop(self, items: Iterable[ast.expr | ast.keyword | ast.arg]) -> None:
        """Delete arguments or parameters that are gone, with their commas."""
        for item in items:
            value = item.value if isinstance(item, ast.keyword) and item.arg is None else item
            value = value.func if isinstance(value, ast.Call) and value is not item else value
            name = getattr(value, 'arg', None) or getattr(value, 'id', None)
            if name in self.facts.gone:
                self.delete_item(*self.place(item))

    def drop_elements(self, elements: Sequence[ast.expr | None], values: Sequence[ast.expr]) -> None:
        """Delete variables that are gone from a list, and what has a string that names such, or entries with such a key."""
        for element, value in zip(elements, values, strict=True):
            if element is None:
                continue
            if isinstance(element, ast.Name):
                wrong = element.id in self.facts.gone
            else:
                gone = self.facts.gone | self.facts.absent
                wrong = any(isinstance(x, ast.Constant) and x.value in gone for x in ast.walk(element))
            if wrong:
                self.delete_item(self.place(element)[0], self.place(value)[1])

    def delete_item(self, start: int, end: int) -> None:
        """Delete one of several with its comma, and a line that has no other."""
        # a default is no part of its parameter
        tail = re.compile(r'( = [^,)\n]+)?,? ?').match(self.text, end)
        end = tail.end() if tail else end
        self.delete(start, end)
        before = {'\n': ' ', ')': ' ,', ']': ' ,', '}': ' ,'}.get(self.text[end], '')
        while before and (self.deleted[start - 1] or self.text[start - 1] in before):
            start -= 1
        if self.text[start - 1] == self.text[end] == '\n':
            end += 1
        self.delete(start, end)


def fold(text: str, facts: Facts) -> str:
    """The text without what the facts exclude."""
    text = str(Folded(text, facts))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Module)) and (said := ast.get_docstring(node, clean=False)):
            text = text.replace(said, without_sentences(without_arguments(said, facts.gone), facts.unsaid))
    comments = r'^( *)#.*\n(?:\1#.*\n)*'
    return re.sub(comments, lambda found: '' if re.search(facts.unsaid, found[0]) else found[0], text, flags=re.M)


def without_arguments(text: str, gone: Iterable[str]) -> str:
    """A docstring without descriptions of arguments that are gone."""
    return re.sub(rf'^( +)({"|".join(gone) or "(?!)"}) \(.*\):\n(?:\1 +.*\n)+', '', text, flags=re.M)


def without_sentences(text: str, unsaid: str) -> str:
    """A docstring without sentences that match, or what follows the `;` before the match; one that is all of it stays.

    A sentence does not go beyond lines of one indentation.
    """
    said = text.split('\n')
    indents = [len(line) - len(line.lstrip()) if line.strip() else -1 for line in said]
    if len(said) > 1 and said[0]:
        # it stands behind the quotes
        indents[0] = max(indents[1], 0)
    kept: list[str] = []
    for indent, group in groupby(indents):
        lines = [said.pop(0) for _ in group]
        if re.search(unsaid, '\n'.join(lines)):
            sentences = (without_clauses(x, unsaid) for x in re.split(r'(?<=\.) ', ' '.join(map(str.strip, lines))))
            margin = ' ' * indent
            left = fill(' '.join(filter(None, sentences)), 127, initial_indent=margin, subsequent_indent=margin)
            lines = left.split('\n') if left.strip() else []
        if lines != [''] or not kept or kept[-1].strip():
            kept += lines
    found = '\n'.join(kept)
    found = found if text.startswith('\n') else found.lstrip()
    return found if found.strip() else text


def without_clauses(sentence: str, unsaid: str) -> str:
    clauses = sentence.split(';')
    wrong = next((i for i, x in enumerate(clauses) if re.search(unsaid, x)), len(clauses))
    return ';'.join(clauses[:wrong]) + ('.' if 0 < wrong < len(clauses) else '')


def without_unused(texts: dict[str, str]) -> dict[str, str]:
    """The modules without imports that they don't use, and what no other names, but tests."""
    for place, text in texts.items():
        if found := re.search(r'^__all__ = (\[[^]]*\])', text, flags=re.M):
            names = ast.literal_eval(found[1])
            others = set(re.findall(r'\w+', '\n'.join(other for x, other in texts.items() if x != place)))
            if not others.issuperset(names):
                texts[place] = text.replace(found[1], str([x for x in names if x in others]))
    while True:
        texts = {place: without_imports(text) for place, text in texts.items()}
        words = Counter(re.findall(r'\w+', '\n'.join(texts.values())))
        shorter = {}
        for place, text in texts.items():
            lines = text.splitlines(keepends=True)
            for name, (first, last) in reversed([*definitions(text)]):
                own = re.findall(r'\w+', ''.join(lines[first - 1:last])).count(name)
                if not name.startswith('test_') and words[name] == own:
                    while first > 1 and lines[first - 2].startswith('#'):
                        first -= 1
                    del lines[first - 1:last]
            shorter[place] = re.sub(r'\n{4,}', '\n\n\n', ''.join(lines)).rstrip() + '\n'
        if shorter == texts:
            return texts
        texts = shorter


def without_imports(text: str) -> str:
    """The module without names that are imported and not used."""
    lines, body = text.splitlines(keepends=True), ast.parse(text).body
    imports = [x for x in body if isinstance(x, (ast.Import, ast.ImportFrom)) and getattr(x, 'module', '') != '__future__']
    own = {number for x in imports for number in range(x.lineno, (x.end_lineno or 0) + 1)}
    words = set(re.findall(r'\w+', ''.join(x for number, x in enumerate(lines, 1) if number not in own)))
    for node in reversed(imports):
        left = [x for x in node.names if (x.asname or x.name.partition('.')[0]) in words]
        if left != node.names:
            node.names = left
            lines[node.lineno - 1:node.end_lineno] = [ast.unparse(node) + '\n'] if left else []
    return ''.join(lines)


def definitions(text: str) -> Iterator[tuple[str, tuple[int, int]]]:
    """Names at a module's top level, and their lines with decorators."""
    for node in ast.parse(text).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name, (min(x.lineno for x in (node, *node.decorator_list)), node.end_lineno or 0)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id != '__all__':
            yield node.targets[0].id, (node.lineno, node.end_lineno or 0)
