"""A server in a process of its own, asked over localhost by the OpenAI client."""

import os
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

import openai
import torch
from transformers import pipeline

from tests.forks import ROOT

PROMPTS = ['The state', 'forgets a little of everything it holds', 'x']
MESSAGES = [{'role': 'user', 'content': 'What is kept?'}]


@contextmanager
def serve(folder, *arguments, env=()):
    """A client of the server that `python *arguments --port ...` starts, which ends with the body of `with`."""
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        port = free.getsockname()[1]
    env = {
        **os.environ, 'HF_HOME': str(folder / 'hf'), 'HF_HUB_OFFLINE': '1', 'OMP_NUM_THREADS': '1', 'PYTHONPATH': str(ROOT),
        **dict(env),
    }
    # the server of transformers lists what is in it
    (folder / 'hf' / 'hub').mkdir(parents=True)
    log = folder / 'log.txt'
    command = [sys.executable, *map(str, arguments), '--host', '127.0.0.1', '--port', str(port)]
    with log.open('w') as out, subprocess.Popen(command, env=env, cwd=folder, stdout=out, stderr=out) as server:
        client = openai.OpenAI(base_url=f'http://127.0.0.1:{port}/v1', api_key='none', max_retries=0, timeout=120)
        try:
            for _ in range(480):
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
            try:
                server.wait(60)
            except subprocess.TimeoutExpired:
                # vLLM's does not listen while it starts
                server.kill()


class Answers:
    """What `generate` answers to a prompt or a chat, with the model and the tokenizer in `folder`."""

    def __init__(self, folder, device='cpu'):
        self.generate = pipeline('text-generation', model=str(folder), dtype=torch.float32, device=device)

    def __call__(self, asked: str | list[dict[str, str]]) -> str:
        return self.generate(asked, max_new_tokens=12, do_sample=False, return_full_text=False)[0]['generated_text']


def check_answers(client: openai.OpenAI, name: str, answers: Answers) -> None:
    """Completions, a chat, and a chat as a stream."""
    options = {'model': name, 'temperature': 0, 'max_tokens': 12}
    for prompt in PROMPTS:
        completion = client.completions.create(prompt=prompt, **options)
        assert completion.choices[0].text == answers(prompt) != ''
    expected = answers(MESSAGES)
    chat = client.chat.completions.create(messages=MESSAGES, **options)
    assert chat.choices[0].message.content == expected
    stream = client.chat.completions.create(messages=MESSAGES, stream=True, **options)
    parts = [part.choices[0].delta.content or '' for part in stream if part.choices]
    assert ''.join(parts) == expected and len([x for x in parts if x]) > 1
