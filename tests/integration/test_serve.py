"""`transformers serve` with Longhorn in it, asked over localhost by the OpenAI client."""

import pytest

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
