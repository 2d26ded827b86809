"""`transformers serve` with Longhorn in it, asked over localhost by the OpenAI client."""

import os
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.integration.process import ROOT, SCRIPTS, run

PROMPTS = ['The state', 'forgets a little of everything it holds', 'x']
MESSAGES = [{'role': 'user', 'content': 'What is kept?'}]


@contextmanager
def serve(folder):
    """A client of a server of its own process, which ends with the body of `with`."""
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        port = free.getsockname()[1]
    env = {**os.environ, 'HF_HOME': str(folder / 'hf'), 'HF_HUB_OFFLINE': '1', 'OMP_NUM_THREADS': '1', 'PYTHONPATH': str(ROOT)}
    command = ['-m', 'fla_longhorn', '-m', 'transformers.cli.transformers', 'serve', str(folder), '--host', '127.0.0.1',
               '--port', str(port), '--device', 'cpu', '--dtype', 'float32']
    # the server lists what is in it
    (folder / 'hf' / 'hub').mkdir(parents=True)
    log = folder / 'log.txt'
    with log.open('w') as out, subprocess.Popen([sys.executable, *command], env=env, stdout=out, stderr=out) as server:
        client = openai.OpenAI(base_url=f'http://127.0.0.1:{port}/v1', api_key='none', max_retries=0, timeout=120)
        try:
            for _ in range(240):
                assert server.poll() is None, log.read_text()
                try:
                    client.models.list()
                    break
                except openai.APIConnectionError:
                    time.sleep(0.5)
            else:
                raise AssertionError(log.read_text())
            yield client
        finally:
            server.terminate()


@pytest.mark.parametrize('model_type', ['longhorn', 'gla'])
def test_the_answers_are_those_of_generate(model_type, tmp_path):
    run('-m', 'fla_longhorn', SCRIPTS / 'make_chat.py', tmp_path, model_type, cwd=tmp_path)
    tokenizer, model = AutoTokenizer.from_pretrained(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path).eval()

    def answer(ids: torch.Tensor) -> str:
        new = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1]:]
        return tokenizer.decode(new, skip_special_tokens=True)

    options = {'model': str(tmp_path), 'temperature': 0}
    with serve(tmp_path) as client:
        for prompt in PROMPTS:
            expected = answer(tokenizer(prompt, return_tensors='pt').input_ids)
            completion = client.completions.create(prompt=prompt, max_tokens=12, **options)
            assert completion.choices[0].text == expected and expected
        template = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_tensors='pt', return_dict=True)
        expected = answer(template.input_ids)
        chat = client.chat.completions.create(messages=MESSAGES, max_tokens=12, **options)
        assert chat.choices[0].message.content == expected
        stream = client.chat.completions.create(messages=MESSAGES, max_tokens=12, stream=True, **options)
        parts = [part.choices[0].delta.content or '' for part in stream if part.choices]
        assert ''.join(parts) == expected and len([x for x in parts if x]) > 1
