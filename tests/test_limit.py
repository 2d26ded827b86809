"""A run with `--seconds` ends early, with its report."""

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

TESTS = """
import time, pytest
@pytest.mark.parametrize('i', range(200))
def test_it(i):
    time.sleep(0.1)
    assert i
"""


@pytest.mark.parametrize('workers', [[], ['-n', '2', '--dist', 'worksteal']], ids=['one process', 'two workers'])
def test_a_run_ends_with_its_report(workers, tmp_path):
    (tmp_path / 'test_them.py').write_text(TESTS)
    report = tmp_path / 'report.xml'
    done = subprocess.run(
        [sys.executable, '-m', 'pytest', '-p', 'tests.conftest', '-q', '--seconds', '1', f'--junitxml={report}', *workers,
         '--rootdir', tmp_path, '-c', '/dev/null', tmp_path / 'test_them.py'],
        cwd=Path(__file__).parents[1], capture_output=True, text=True,
    )
    suite = ElementTree.parse(report).getroot().find('testsuite')
    assert done.returncode == 2 and 'stopped after 1 s' in done.stdout, done.stdout + done.stderr
    assert 1 <= int(suite.get('tests')) < 200 and 'FAILED' in done.stdout and int(suite.get('failures')) == 1
