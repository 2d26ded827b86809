"""What is slow in a prediction, kept on disk: a kernel's walks do not depend on the model's constants."""

from __future__ import annotations

import hashlib
import os
import pickle
import zlib
from pathlib import Path

from offgpu.launches import Launch
from offgpu.predict import integers, needed, runs, warp
from offgpu.predict.machine import Machine
from offgpu.predict.runs import Runs
from offgpu.predict.times import Prediction, predict

KEPT = Path('build', 'walks')
# whoever changes them walks again
CODE = [Path(module.__file__) for module in (integers, needed, runs, warp) if module.__file__]


def key(launch: Launch) -> str:
    """Of a kernel's binary and all that decides which way its warps go."""
    other = launch.other or launch
    about = (
        launch.grid, launch.num_warps, launch.shared, sorted(launch.scalars.items()), other.grid,
        sorted(other.scalars.items()), [(a.name, a.kind) for a in launch.arguments],
    )
    assert launch.binary is not None, launch.kernel
    return hashlib.sha256(launch.binary + repr(about).encode()).hexdigest()[:32]


class Walks:
    """`predict` with the walks of a folder; those of changed code are not found."""

    def __init__(self, folder: Path) -> None:
        code = hashlib.sha256(b''.join(path.read_bytes() for path in CODE)).hexdigest()[:8]
        self.folder = folder / f'walks-{code}'
        self.folder.mkdir(parents=True, exist_ok=True)

    def predict(self, launch: Launch, machine: Machine, seen: set[int]) -> Prediction:
        if launch.binary is None:
            return predict(launch, machine, seen)
        path, walks = self.folder / key(launch), Runs(launch)
        if path.exists():
            launch.program, walks.bases, walks.known, walks.notes = pickle.loads(zlib.decompress(path.read_bytes()))
        before = len(walks.known)
        prediction = predict(launch, machine, seen, walks)
        if len(walks.known) > before:
            part = path.with_suffix(f'.{os.getpid()}')
            part.write_bytes(zlib.compress(pickle.dumps((launch.program, walks.bases, walks.known, walks.notes)), 1))
            part.replace(path)
        return prediction
