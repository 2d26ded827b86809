"""A process that works through its share of a stage's items, watched from outside."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# of what a process printed, kept for the error of an item that ends it
LAST_LINES, LONGEST_LINE = 60, 1000
# imports, and the collection of tests
STARTING_SECONDS = 60.0
# an item that never begins would be started for ever
MOST_STARTS = 50


def with_kit(environment: dict[str, str]) -> dict[str, str]:
    """The environment of a process, with that of the kit."""
    own = (str(ROOT), str(ROOT / 'packages' / 'cpu'), str(ROOT / 'packages' / 'offgpu'))
    folders = environment.get('PYTHONPATH'), *own, os.environ.get('PYTHONPATH')
    path = os.pathsep.join(filter(None, folders))
    return os.environ | environment | {'PYTHONPATH': path, 'PYTHONUNBUFFERED': '1'}


class Lane:
    """The processes, one after the other, of share `index` of a stage: each imports at its start, and works from `go` on."""

    def __init__(self, stage: Any, device: str, index: int, environment: dict[str, str]) -> None:
        self.stage, self.device, self.index, self.environment = stage, device, index, environment
        self.starts = 0
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        read, write = os.pipe()
        plan = {
            'module': self.stage.module, 'device': self.device, 'share': [self.index, self.stage.lanes], 'rows': write,
        }
        self.starts += 1
        self.item: str | None = None
        self.since, self.done, self.ready = time.monotonic(), False, threading.Event()
        self.records: queue.SimpleQueue[dict] = queue.SimpleQueue()
        self.printed: deque[str] = deque(maxlen=LAST_LINES)
        # a group of its own, whose processes all end with it
        self.process = subprocess.Popen(
            [sys.executable, '-m', 'benchmarks.gpu.work'], cwd=ROOT, pass_fds=[write], start_new_session=True,
            env=with_kit(self.environment),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors='replace',
        )
        os.close(write)
        self.tell(plan)
        self.readers = [
            threading.Thread(target=self.read_rows, args=[os.fdopen(read, encoding='utf-8')], daemon=True),
            threading.Thread(target=self.read_printed, args=[self.process.stdout], daemon=True),
        ]
        for reader in self.readers:
            reader.start()

    def tell(self, line: object) -> None:
        # it may have ended
        with suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(line) + '\n')
            self.process.stdin.flush()

    def go(self, ended: set[str], cut: set[str]) -> None:
        """Work through the items that have not ended, last through those that took what was left of an earlier turn."""
        if self.process is None:
            self.start()
        self.since = time.monotonic()
        # more than a pipe holds waits until the process reads
        threading.Thread(target=self.tell, args=[[sorted(ended), sorted(cut)]], daemon=True).start()

    def restart(self, ended: set[str], cut: set[str]) -> None:
        self.start()
        self.go(ended, cut)

    def read_rows(self, lines: Any) -> None:
        with lines:
            for line in lines:
                # one that was killed while it wrote
                if line.endswith('\n'):
                    record = json.loads(line)
                    if 'ready' in record:
                        self.ready.set()
                    else:
                        self.records.put(record)
        # or ended
        self.ready.set()

    def read_printed(self, lines: Any) -> None:
        for line in lines:
            self.printed.append(line[:LONGEST_LINE])

    def take(self) -> Iterator[dict]:
        """Records of items that have ended."""
        while not self.records.empty():
            record = self.records.get()
            self.since = time.monotonic()
            if 'begun' in record:
                self.item = record['begun']
            elif 'done' in record:
                self.done, self.item = True, None
            else:
                self.item = None
                yield record

    def state(self) -> str:
        """'working', 'ended', 'failed' (the process ended before its items) or 'hung'."""
        if self.process.poll() is not None:
            # what it wrote last may still be on its way
            self.readers[0].join(1.0)
            return 'working' if not self.records.empty() else 'ended' if self.done else 'failed'
        limit = self.stage.seconds if self.item else max(self.stage.seconds, STARTING_SECONDS)
        if self.done:
            limit = 10.0
        if time.monotonic() - self.since < limit:
            return 'working'
        return 'ended' if self.done else 'hung'

    def restarts(self) -> bool:
        """Whether another process could do more: an item is to blame."""
        return self.item is not None and self.starts < MOST_STARTS

    def failure(self) -> dict:
        """Kill what is left; the record of the item that hung or ended the process."""
        state, seconds = self.state(), time.monotonic() - self.since
        if state == 'hung':
            # it prints where its threads are
            self.process.send_signal(signal.SIGUSR1)
            time.sleep(0.5)
        process = self.process
        self.kill()
        status = process.returncode
        how = f'did not end within {seconds:.0f} s' if state == 'hung' else f'ended its process with status {status}'
        self.readers[1].join(1.0)
        name = self.item or f'the start of share {self.index}'
        error = f'{"".join(self.printed)}\n{name} {how}'
        return ({'item': self.item} if self.item else {'start': self.index}) | {'error': error, 'seconds': round(seconds, 1)}

    def kill(self) -> None:
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            with suppress(BrokenPipeError):
                self.process.stdin.close()
            self.process = None
