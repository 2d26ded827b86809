"""SGLang's OpenAI server with Longhorn in it."""

import os

from packages.serving.tests.sglang.conftest import OPTIONS
from tests import forks
from tests.integration.server import Answers, check_answers, serve


def test_the_answers_are_those_of_generate(tmp_path):
    forks.output(forks.SCRIPTS / 'make_chat.py', tmp_path, 'longhorn', cwd=tmp_path)
    command = ('-m', 'sglang.launch_server', '--model-path', tmp_path, '--served-model-name', 'longhorn')
    options = [
        x for name, value in OPTIONS.items() if value is not True for x in (f'--{name.replace("_", "-")}', value)
    ]
    with serve(tmp_path, *command, *options, env={'PYTHONPATH': os.environ['PYTHONPATH']}) as client:
        check_answers(client, 'longhorn', Answers(tmp_path))
