"""Changing modules once they are imported: the device itself, and what a suite puts in place of kernels."""

import sys

from offgpu.pretend import after_import


def test_several_changes_of_one_module(tmp_path, monkeypatch):
    """Each hook finds the module through the others."""
    (tmp_path / 'changed_module.py').write_text('value = 1')
    monkeypatch.syspath_prepend(tmp_path)
    for factor in (2, 3):
        after_import('changed_module', lambda module, factor=factor: setattr(module, 'value', factor * module.value))
    import changed_module
    assert changed_module.value == 6 and not any(getattr(x, 'name', '') == 'changed_module' for x in sys.meta_path)
