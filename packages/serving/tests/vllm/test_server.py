"""vLLM's OpenAI server with Longhorn in it."""

from tests import forks
from tests.integration.server import Answers, check_answers, serve


def test_the_answers_are_those_of_generate(tmp_path):
    forks.output(forks.SCRIPTS / 'make_chat.py', tmp_path, 'longhorn', cwd=tmp_path)
    # the server's engine is a process of its own
    env = {'VLLM_ENABLE_V1_MULTIPROCESSING': '1'}
    command = ('-m', 'vllm.entrypoints.openai.api_server', '--model', tmp_path, '--served-model-name', 'longhorn')
    options = ('--dtype', 'float32', '--enforce-eager', '--max-model-len', '256', '--max-num-seqs', '8')
    with serve(tmp_path, *command, *options, env=env) as client:
        check_answers(client, 'longhorn', Answers(tmp_path))
