"""The entry point by which SGLang finds the model."""

import pkgutil
import tomllib

from tests import forks

PROJECT = forks.ROOT / 'packages/serving/pyproject.toml'
IMPORTS = '''
import sys, fla_longhorn_serving.sglang_plugin
print({'torch', 'transformers', 'fla', 'fla_longhorn', 'sglang'} & set(sys.modules))
import fla_longhorn
print([x for x in sys.modules if x.startswith(('sglang', 'fla_longhorn_serving.vllm.', 'fla_longhorn_serving.sglang.'))])
'''


def test_inert():
    """What the entry point names can be imported without SGLang, and so can the package, which does not ask for it."""
    entry_points = tomllib.loads(PROJECT.read_text())['project']['entry-points']['sglang.srt.plugins']
    assert entry_points == {'longhorn': 'fla_longhorn_serving.sglang_plugin:register'}
    done = forks.run('-c', IMPORTS, fla=False)
    assert done.stdout.split('\n')[:2] == ['set()', '[]'], done.stdout + done.stderr
    assert callable(pkgutil.resolve_name(entry_points['longhorn']))
