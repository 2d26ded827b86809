"""The benchmark of a step's parts finds each of them in this version of vLLM and of the plugin."""

from benchmarks.models.serving_parts import Parts, watch
from packages.serving.tests import checkpoints


class Watched(Parts):
    """Names the parts, and sets back what it wraps."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.names, self.monkeypatch = set(), monkeypatch

    def wrap(self, part, owner, *names):
        self.names.add(part)
        for name in names:
            self.monkeypatch.setattr(owner, name, self.wrapped(part, getattr(owner, name)))


def test_each_part_takes_time(engine, variant, monkeypatch):
    from vllm import SamplingParams

    llm, parts = engine(variant('paper').folder), Watched(monkeypatch)
    watch(parts, llm)
    sampling = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
    llm.generate([{'prompt_token_ids': x} for x in checkpoints.prompts()], sampling, use_tqdm=False)
    assert parts.names == {part for part, seconds in parts.seconds.items() if seconds > 0}
