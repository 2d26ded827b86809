"""Mutations of what vLLM computes in place of the layer; they are listed and run where vLLM is installed."""

from tests.mutate.mutation import Mutation

TOKENS = 'packages/serving/tests/vllm/test_tokens.py::test_batch'

MUTATIONS = [
    Mutation(
        'project-of-the-layer', 'layers/longhorn.py', 'self.k_norm(self.by_heads(k)),', 'self.k_norm(self.by_heads(-k)),',
        "transformers stores under other keys than vLLM's mixer", TOKENS, 'exact-heads',
    ),
    Mutation(
        'project-of-the-mixer', 'packages/serving/fla_longhorn_serving/vllm/mixer.py', "return {'q': q, 'k': k,",
        "return {'q': q, 'k': -k,", "vLLM's mixer stores under other keys than the layer", TOKENS, 'exact-heads',
    ),
]
