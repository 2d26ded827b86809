"""The needle picture: recall by length and depth, from the samples that lm_eval wrote with `--log_samples`.

    python -m lab.experiments needle out/*/samples_longhorn_niah_*.jsonl [--plot needle.png]

Prints recall in percent by task and length. The picture has a panel for each task: lengths across, tenths of the depth down.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

ROWS = 10

# (depth, recall) of each sample, by task and length
Recalls = dict[str, dict[int, list[tuple[float, float]]]]


def read(paths: list[Path]) -> Recalls:
    recalls: Recalls = {}
    for path in sorted(paths):
        lengths = recalls.setdefault(path.stem.removeprefix('samples_').rpartition('_')[0], defaultdict(list))
        for line in path.read_text().splitlines():
            sample = json.loads(line)
            length = sample['doc']['max_length']
            lengths[length].append((sample['doc']['depth'], sample[str(length)]))
    return recalls


def by_depth(some: list[tuple[float, float]]) -> np.ndarray:
    """The mean recall in each tenth of the depth, `[ROWS]`, NaN where there is no sample."""
    depths, recall = np.array(some).T
    rows = np.minimum((depths * ROWS).astype(int), ROWS - 1)
    count, total = (np.bincount(rows, weights=x, minlength=ROWS) for x in (None, recall))
    return np.where(count, total / np.maximum(count, 1), np.nan)


def draw(recalls: Recalls, path: Path | str) -> None:
    figure = Figure(figsize=(1.2 + 2.6 * len(recalls), 3.4), dpi=140, layout='constrained')
    axes = figure.subplots(1, len(recalls), squeeze=False, sharey=True)[0]
    for axis, (task, lengths) in zip(axes, recalls.items(), strict=True):
        table = np.stack([by_depth(lengths[length]) for length in sorted(lengths)], axis=1)
        image = axis.imshow(table, vmin=0, vmax=1, cmap='cividis', aspect='auto', extent=(0, len(lengths), 100, 0))
        axis.set_xticks(np.arange(len(lengths)) + 0.5, [f'{length:,}' for length in sorted(lengths)], fontsize=8)
        axis.set_title(task.removeprefix('longhorn_'), fontsize=10)
        axis.set_xlabel('tokens')
    axes[0].set_ylabel('depth of the needle, %')
    figure.colorbar(image, ax=axes, label='recall')
    figure.savefig(path)


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog='python -m lab.experiments needle', description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument('samples', type=Path, nargs='+', help='JSON-lines files of the S-NIAH tasks of one model')
    parser.add_argument('--plot', metavar='FILE.png', help='draw the picture here')
    options = parser.parse_args(args)
    recalls = read(options.samples)
    for task, lengths in recalls.items():
        means = {length: np.mean([recall for _, recall in lengths[length]]) for length in sorted(lengths)}
        print(task, *(f'{length:,}: {mean:.1%}' for length, mean in means.items()), sep='  ')
    if options.plot:
        draw(recalls, options.plot)
