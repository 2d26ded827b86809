"""`transformers serve` with Longhorn in it, asked over localhost by the OpenAI client."""

import pytest

from tests import forks
from tests.integration.server import Answers, check_answers, serve


@pytest.mark.slow
@pytest.mark.parametrize('model_type', ['longhorn', 'gla'])
def test_the_answers_are_those_of_generate(model_type, tmp_path, device):
    forks.output('-m', 'fla_longhorn', forks.SCRIPTS / 'make_chat.py', tmp_path, model_type, cwd=tmp_path)
    command = ('-m', 'fla_longhorn', '-m', 'transformers.cli.transformers', 'serve', tmp_path)
    with serve(tmp_path, *command, '--device', device, '--dtype', 'float32') as client:
        check_answers(client, str(tmp_path), Answers(tmp_path, device))
