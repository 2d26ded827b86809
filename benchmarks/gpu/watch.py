"""The card and the machine beside each result; nothing of the card's settings is changed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from typing import Any

from benchmarks.gpu.lane import with_kit

FIELDS = ('clocks.sm', 'clocks.mem', 'power.draw', 'temperature.gpu', 'clocks_event_reasons.active')


class Watch:
    """The latest reading of `nvidia-smi`, twice a second; none where there is no `nvidia-smi`."""

    def __init__(self, device: str) -> None:
        self.reading, self.process = '', None
        if device.startswith('cuda') and shutil.which('nvidia-smi'):
            self.process = subprocess.Popen(
                ['nvidia-smi', f'--query-gpu={",".join(FIELDS)}', '--format=csv,noheader', '-lms', '500'],
                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            )
            threading.Thread(target=self.read, daemon=True).start()

    def read(self) -> None:
        for line in self.process.stdout:
            self.reading = line.strip()

    def now(self) -> dict[str, str]:
        return {'card': self.reading} if self.reading else {}

    def stop(self) -> None:
        if self.process:
            self.process.kill()
            self.process.wait()


def about_machine(device: str, environment: dict[str, str]) -> dict[str, Any]:
    """Versions, card and commit, of a process with the kit's packages."""
    code = f'import json; from benchmarks.measure.machine import describe_machine as d; print(json.dumps(d({device!r})))'
    command = [sys.executable, '-c', code]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env=with_kit(environment))
        return json.loads(done.stdout.splitlines()[-1])
    except (subprocess.SubprocessError, ValueError, IndexError) as error:
        return {'error': f'{type(error).__name__}: {getattr(error, "stderr", "") or error}'[-2000:]}
