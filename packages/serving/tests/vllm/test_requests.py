"""What a request may ask for beside the likeliest tokens, compared with transformers."""

import asyncio
from contextlib import aclosing

import torch
from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM

from packages.serving.tests.checkpoints import NEW_TOKENS, OPTIONS, distributions, prompts
from tests.integration.server import PROMPTS

GREEDY = {'temperature': 0, 'max_tokens': NEW_TOKENS, 'ignore_eos': True, 'detokenize': False}
REQUESTS = [{'prompt_token_ids': x} for x in prompts()]
CLOSE = {'rtol': 0, 'atol': 1e-4}


def values(steps, tokens) -> torch.Tensor:
    return torch.tensor([step[token].logprob for step, token in zip(steps, tokens, strict=True)])


def test_samples(engine, variant):
    """Three samples for each prompt differ, are the same again from a seed, and have the probabilities that vLLM says."""
    checkpoint = variant('heads')
    llm = engine(checkpoint.folder)
    sampling = SamplingParams(**GREEDY | {'temperature': 1.0}, n=3, seed=5, logprobs=4)
    first, again = (llm.generate(REQUESTS, sampling, use_tqdm=False) for _ in range(2))
    assert [[x.token_ids for x in a.outputs] for a in first] == [[x.token_ids for x in a.outputs] for a in again]
    for prompt, request in zip(prompts(), first, strict=True):
        assert len({tuple(x.token_ids) for x in request.outputs}) == 3
        for sample in request.outputs:
            tokens = list(sample.token_ids)
            wanted = distributions(checkpoint.model, prompt, tokens)
            theirs, best = wanted.gather(1, torch.tensor(tokens)[:, None])[:, 0], wanted.topk(4)
            torch.testing.assert_close(values(sample.logprobs, tokens), theirs, **CLOSE)
            for step, likeliest, log_p in zip(sample.logprobs, best[1].tolist(), best[0], strict=True):
                torch.testing.assert_close(values([step] * 4, likeliest), log_p, **CLOSE)


def test_cancelled_requests(engine, variant):
    """Every other request ends in the middle: others' tokens stay, and requests in the pages that became free have theirs."""
    checkpoint = variant('hybrid')
    llm = engine(checkpoint.folder)
    core, tokens = llm.llm_engine, {}

    def run(steps: int) -> None:
        while core.has_unfinished_requests() and steps:
            steps -= 1
            tokens.update({x.request_id: list(x.outputs[0].token_ids) for x in core.step() if x.finished})

    for i, prompt in enumerate(REQUESTS):
        core.add_request(f'{i}', prompt, SamplingParams(**GREEDY))
    run(8)
    core.abort_request([f'{i}' for i in range(0, 8, 2)])
    run(4)
    for i, prompt in enumerate(REQUESTS):
        core.add_request(f'{i} again', prompt, SamplingParams(**GREEDY))
    run(200)
    first = {f'{i}': x for i, x in enumerate(checkpoint.tokens) if i % 2}
    assert tokens == first | {f'{i} again': x for i, x in enumerate(checkpoint.tokens)}


def test_text(engine, variant):
    """Stop strings and guided decoding."""
    checkpoint = variant('paper')
    tokenizer = AutoTokenizer.from_pretrained(checkpoint.folder)
    llm = engine(checkpoint.folder, skip_tokenizer_init=False)

    def answer(prompt: str, **options) -> str:
        ids = tokenizer(prompt, return_tensors='pt').input_ids
        tokens = checkpoint.model.generate(ids, max_new_tokens=24, do_sample=False, **options)[0]
        return tokenizer.decode(tokens[ids.shape[1]:])

    for prompt in PROMPTS:
        stop = [x for x in answer(prompt) if x.isascii()][-1]
        output = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=24, stop=[stop]), use_tqdm=False)[0].outputs[0]
        wanted = answer(prompt, stop_strings=[stop], tokenizer=tokenizer)
        assert wanted.endswith(stop) and (output.text, output.finish_reason) == (wanted.removesuffix(stop), 'stop')
    digits = list(b'0123456789')
    guided = SamplingParams(temperature=0, max_tokens=24, structured_outputs=StructuredOutputsParams(regex='[0-9]{24}'))
    for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, guided, use_tqdm=False), strict=True):
        assert output.outputs[0].text == answer(prompt, prefix_allowed_tokens_fn=lambda *_: digits)


def test_streams(variant):
    """Streams of an engine in another process, with pages for two requests: some end in the middle, and leave their pages."""
    checkpoint = variant('paper')

    async def ask(llm: AsyncLLM, i: int, name: str, most: int = NEW_TOKENS) -> list[int]:
        sampling, tokens = SamplingParams(**GREEDY, output_kind=RequestOutputKind.DELTA), []
        # closed before the last token, a stream cancels its request
        async with aclosing(llm.generate(REQUESTS[i], sampling, request_id=name)) as stream:
            async for output in stream:
                tokens += output.outputs[0].token_ids
                if len(tokens) >= most:
                    break
        return tokens

    async def run() -> None:
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(str(checkpoint.folder), num_gpu_blocks_override=3, **OPTIONS))
        try:
            async with asyncio.timeout(300):
                for turn in range(3):
                    cancelled, whole = await asyncio.gather(
                        ask(llm, 5, f'cancelled {turn}', most=3), ask(llm, 7, f'whole {turn}'),
                    )
                    assert cancelled == checkpoint.tokens[5][:len(cancelled)] and 3 <= len(cancelled) < NEW_TOKENS
                    assert whole == checkpoint.tokens[7]
                tokens = await asyncio.gather(*(ask(llm, i, f'{i}') for i in range(8)))
                assert tokens == checkpoint.tokens
        finally:
            llm.shutdown()

    asyncio.run(run())
