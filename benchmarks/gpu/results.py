"""Records of a run, on disk as they come; a disk that is full costs none of them."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path

# characters of an error: thousands of them go into a file of 16 MiB
LONGEST_ERROR = 8000


class Results:
    """`results.jsonl` of a folder: its records, which items have ended or were cut, and which stages are finished.

    What cannot be written is printed and tried again with the next record.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / 'results.jsonl'
        self.records: list[dict] = []
        self.ended: dict[str, set[str]] = defaultdict(set)
        self.cut: dict[str, set[str]] = defaultdict(set)
        self.finished: set[str] = set()
        self.unwritten: list[str] = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lines = self.path.read_text(encoding='utf-8', errors='replace').splitlines() if self.path.is_file() else []
        except OSError as error:
            print(f'{self.path} cannot be read: {error}', flush=True)
            lines = []
        for line in lines:
            # a call that was killed, or a full disk, may have left half a line
            if line.startswith('{') and line.endswith('}'):
                self.note(json.loads(line))

    def note(self, record: dict) -> None:
        self.records.append(record)
        if 'item' in record:
            self.ended[record['stage']].add(record['item'])
        elif 'cut' in record:
            self.cut[record['stage']] |= {*record['cut']}
        elif 'finished' in record:
            if record['finished']:
                self.finished.add(record['stage'])

    def is_finished(self, stage: str) -> bool:
        return stage in self.finished

    def add(self, record: dict) -> None:
        if len(error := record.get('error', '')) > LONGEST_ERROR:
            half = LONGEST_ERROR // 2
            record = record | {'error': f'{error[:half]}\n... {len(error) - 2 * half} characters ...\n{error[-half:]}'}
        self.note(record)
        self.unwritten.append(json.dumps(record))
        try:
            with self.path.open('a', encoding='utf-8') as file:
                # an empty line ends what an earlier failure left
                file.write('\n' + '\n'.join(self.unwritten) + '\n')
                file.flush()
                os.fsync(file.fileno())
            self.unwritten.clear()
        except OSError as error:
            print(f'not written ({error}): {self.unwritten[-1]}', flush=True)

    def write_page(self, text: str) -> None:
        try:
            (self.folder / 'page.md').write_text(text, encoding='utf-8')
        except OSError as error:
            print(f'page.md is not written ({error})', flush=True)
