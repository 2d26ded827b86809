"""What a package installs."""

import tomllib

import pytest

import fla_longhorn
from tests import forks
from tests.test_package import check_wheel

# distribution -> (its folder, the packages in its wheel, other files in it)
DISTRIBUTIONS = {
    'fla_longhorn_cpu': ('packages/cpu', ('fla_cpu', 'fla_kit', 'fla_longhorn_cpu'), ['fla_cpu/py.typed', 'fla_kit/py.typed']),
    'fla_longhorn_serving': ('packages/serving', ('fla_longhorn_serving',), []),
    'fla_longhorn_extras': ('packages/extras', ('fla_longhorn_extras',), ['fla_longhorn_extras/lm_eval/tasks/*']),
    'offgpu': ('packages/offgpu', ('offgpu',), ['offgpu/calibration/*.csv', 'offgpu/predict/*.c', 'offgpu/pretend/csrc/*']),
}


@pytest.mark.slow
@pytest.mark.parametrize('name', DISTRIBUTIONS)
def test_wheels_hold_their_packages(name, tmp_path):
    check_wheel(name, *DISTRIBUTIONS[name], tmp_path)


def test_one_version():
    """Of the plugin and its packages."""
    projects = forks.ROOT.glob('packages/*/pyproject.toml')
    declared = {path: tomllib.loads(path.read_text())['project']['version'] for path in projects}
    assert set(declared.values()) == {fla_longhorn.__version__}, declared
