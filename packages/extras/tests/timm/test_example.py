"""`python -m examples.vision` at a small size, from the digits to a reloaded checkpoint's answers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import fla_longhorn
from examples.vision.__main__ import main
from examples.vision.plot import COLUMNS, ROWS

SMALL = ['--seeds', '1', '--epochs', '1', '--patch_size', '14', '--train_size', '4900', '--batch_size', '350']


def test_the_whole_way(tmp_path):
    models = ['both directions, exact', 'ViT']
    # 1 says that the target was missed
    assert main([*SMALL, '--models', *models, '--target_accuracy', '1', '--output_dir', str(tmp_path)]) == 1
    report = json.loads((tmp_path / 'vision.json').read_text())
    assert [run['model'] for run in report['runs']] == models and report['held_out'] == 100
    assert all(0 < run['accuracy'] < 1 for run in report['runs']) and len(report['answers']) == COLUMNS * ROWS
    assert (tmp_path / 'vision.png').stat().st_size > 10_000


SCRIPT = """
import argparse
import timm
parser = argparse.ArgumentParser()
parser.add_argument('--model')
model = timm.create_model(parser.parse_args().model, num_classes=3)
print(type(model).__name__, timm.data.resolve_data_config(model=model)['input_size'])
"""


def test_scripts_of_timm_find_the_models(tmp_path):
    """As its `validate.py` and `inference.py` make them: by name, in a program that imports timm alone."""
    (tmp_path / 'validate.py').write_text(SCRIPT)
    command = ['validate.py', '--model', 'vision_longhorn_tiny_patch16_224']
    env = os.environ | {'PYTHONPATH': str(Path(fla_longhorn.__file__).parents[1])}
    # as in docs/vision.md
    program = "import runpy, fla_longhorn_extras.timm; runpy.run_path('validate.py', run_name='__main__')"
    for runner, status in (([], 1), (['-c', program], 0)):
        words = [*runner, *command[bool(runner):]]
        done = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, env=env)
        assert done.returncode == status, done.stderr
    assert done.stdout == 'VisionLonghorn (3, 224, 224)\n'
