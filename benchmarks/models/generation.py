"""Greedy decoding of several models, a few tokens of each in turn, so that other load on the machine affects all alike."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from transformers import PreTrainedModel

from benchmarks.measure import timing
from benchmarks.models.registry import WARM, Size, random_tokens

TURNS = 4


class System:
    """A model, and how long its longest prompt took."""

    def __init__(self, name: str, model: PreTrainedModel):
        self.name, self.model = name, model
        self.tokens, self.ms = 0, 0.0

    def expected_seconds(self, tokens: int) -> float:
        """Estimated seconds to read so many tokens, from the last prompt."""
        return 1e-3 * self.ms * tokens / self.tokens if self.tokens else 0.0


def stream(system: System, ids: torch.Tensor, new_tokens: int) -> Iterator[tuple[torch.Tensor, object]]:
    """The greedy tokens `[B]` of `generate`, one after another, each with the cache so far.

    The set-up and the loop are those of `generate`, without its check at every token whether to stop.
    """
    @torch.no_grad()
    def decode(model, input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus=False, **state):
        inputs = model.prepare_inputs_for_generation(input_ids, is_first_iteration=True, **state)
        before = None
        for _ in range(new_tokens):
            outputs = model(**inputs, return_dict=True)
            state = model._update_model_kwargs_for_generation(outputs, state)
            tokens = outputs.logits[:, -1].float().argmax(-1)
            del outputs
            cache = next(state[x] for x in ('past_key_values', 'cache', 'cache_params') if state.get(x) is not None)
            # without what it should read, a model's tokens would be wrong and its times too short
            if before is not None and cache is not before:
                raise RuntimeError('a token did not continue from the cache of the token before it')
            before = cache
            input_ids = torch.cat([input_ids, tokens[:, None]], -1)
            yield tokens, cache
            inputs = model.prepare_inputs_for_generation(input_ids, next_sequence_length=1, **state)

    return system.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False, custom_generate=decode,
    )


def measure_generation(
    systems: list[System], size: Size, batch: int, prompt: int, device: torch.device, seconds: float, errors: dict[str, str],
) -> dict[str, dict]:
    """For each system: times of the prompt with its first token and of each later token, bytes of cache and weights.

    If a system has none, the reason is put into `errors`.
    """
    by_name = {system.name: system for system in systems}
    ids = random_tokens(size, batch, prompt, device)
    streams: dict[str, Iterator] = {}
    caches = {}

    def read_prompt(name: str) -> None:
        # frees the previous cache
        streams.pop(name, None)
        streams[name] = stream(by_name[name], ids, WARM + size.new_tokens)
        next(streams[name])

    def warm(name: str) -> None:
        for _ in range(WARM - 1):
            _, caches[name] = next(streams[name])

    runs = {name: (lambda name=name: read_prompt(name)) for name in by_name}
    if device.type == 'cuda' or prompt == min(size.prompts):
        for name in runs:
            with timing.noted(errors, name):
                runs[name]()
    first = timing.take_turns(runs, device, seconds, errors)
    for name in streams:
        with timing.noted(errors, name):
            if name not in errors:
                warm(name)
    times = decode_in_turns({name: x for name, x in streams.items() if name not in errors}, size.new_tokens, device, errors)

    figures = {}
    for name, system in by_name.items():
        if name not in errors:
            system.tokens, system.ms = batch * prompt, min(first[name])
            figures[name] = {
                'batch': batch, 'prompt': prompt, 'first': timing.summarize(first[name]),
                'token': timing.summarize(times[name]), 'state_bytes': tensor_bytes(caches[name]),
                'weight_bytes': tensor_bytes([*system.model.parameters(), *system.model.buffers()]),
            }
    return figures


def decode_in_turns(
    streams: dict[str, Iterator], tokens: int, device: torch.device, errors: dict[str, str],
) -> dict[str, list[float]]:
    """Milliseconds of each token of each stream; the streams take turns."""
    times: dict[str, list[float]] = {name: [] for name in streams}
    for turn in range(TURNS):
        for name, tokens_of in streams.items():
            with timing.noted(errors, name):
                for _ in range(0 if name in errors else (turn + 1) * tokens // TURNS - turn * tokens // TURNS):
                    start = time.perf_counter()
                    next(tokens_of)
                    if device.type == 'cuda':
                        torch.cuda.synchronize(device)
                    times[name].append(1e3 * (time.perf_counter() - start))
    return times


def tensor_bytes(value: object, seen: set[int] | None = None) -> int:
    """Bytes of all tensors in a cache or among weights, in any container."""
    seen = set() if seen is None else seen
    if value is None or isinstance(value, (str, int, float, type)) or id(value) in seen:
        return 0
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, dict):
        return sum(tensor_bytes(x, seen) for x in value.values())
    if isinstance(value, (list, tuple)):
        return sum(tensor_bytes(x, seen) for x in value)
    return sum(tensor_bytes(x, seen) for x in vars(value).values()) if hasattr(value, '__dict__') else 0
