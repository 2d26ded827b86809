"""The card and the machine beside each result; nothing of the card's settings is changed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from typing import Any

from benchmarks.gpu.lane import ROOT, with_kit

PROBE = ['-m', 'benchmarks.gpu.probe']
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


def about_machine(device: str) -> dict[str, Any]:
    """Versions, card and commit, or `error`: why nothing can run; of another process, which holds no memory of the card."""
    command = [sys.executable, *PROBE, device]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, env=with_kit({}))
        return json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {'error': 'the device has not answered for a minute'}
    except (ValueError, IndexError):
        last = (done.stderr.strip() or f'status {done.returncode}').splitlines()[-1]
        return {'error': f'the process that looks for it ended: {last[:300]}'}
