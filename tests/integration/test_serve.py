"""`transformers serve` with Longhorn in it, asked over localhost by the OpenAI client; what all servers refuse."""

import pytest

import fla_longhorn_serving
from fla_longhorn import LonghornConfig
from tests import forks
from tests.integration.server import Answers, check_answers, serve

# as in docs/serve.md
SERVE = "import runpy, fla_longhorn; runpy.run_module('transformers.cli.transformers', run_name='__main__', alter_sys=True)"


@pytest.mark.slow
@pytest.mark.parametrize('model_type', ['longhorn', 'gla'])
def test_the_answers_are_those_of_generate(model_type, tmp_path, device):
    forks.output(forks.SCRIPTS / 'make_chat.py', tmp_path, model_type, cwd=tmp_path)
    command = ('-c', SERVE, 'serve', tmp_path)
    with serve(tmp_path, *command, '--device', device, '--dtype', 'float32') as client:
        check_answers(client, str(tmp_path), Answers(tmp_path, device))


def test_options_that_a_host_has_not(monkeypatch):
    """vLLM and SGLang have the options in `KNOWN`."""
    config = LonghornConfig(gate='head', num_heads=2)
    fla_longhorn_serving.check_known('a host', config)
    monkeypatch.setattr(fla_longhorn_serving, 'KNOWN', [name for name in fla_longhorn_serving.KNOWN if name != 'gate'])
    with pytest.raises(ValueError, match="gate must be None in a host, which has no such option, got 'head'"):
        fla_longhorn_serving.check_known('a host', config)
    fla_longhorn_serving.check_known('a host', LonghornConfig())
