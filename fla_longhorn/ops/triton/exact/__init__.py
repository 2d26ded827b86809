"""The exact update (arXiv 2407.14207, Theorem 3.1) in Triton.

.. math::
    \\epsilon_t = \\beta_t / (1 + \\beta_t |k_t|^2), \\qquad
    S_t = S_{t-1} + k_t \\otimes \\epsilon_t \\odot (v_t - k_t^\\top S_{t-1})

The forward is the chunkwise form of `forward.py` or the recurrence of `recurrent.py`; both save the same states, from which
`backward.py` starts. The words, by length:

- chunk: `BT` = 8 or 16 tokens, which one substitution solves; `gram.py` writes its matrices.
- span: `SPAN` tokens, between states that `backward_qk.py` reads; one of its programs sums a span over all channels.
- interval: tokens between the states that the forward saves; one program of `replay.py` recomputes an interval.
- slot: the place of a chunk, a span or an interval in a buffer (`ops/checkpoints.py`).

In kernels, G is the Gram matrix of a chunk's keys and g the gate; U are updates of the state, R residuals, E step sizes; X, W
are to the gradients what R, U are to the values. A part is one of the two 16-bit numbers that hold a float32.
"""
