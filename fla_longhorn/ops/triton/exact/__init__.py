"""The exact update (arXiv 2407.14207, Theorem 3.1) in Triton.

.. math::
    \\epsilon_t = \\beta_t / (1 + \\beta_t |k_t|^2), \\qquad
    S_t = S_{t-1} + k_t \\otimes \\epsilon_t \\odot (v_t - k_t^\\top S_{t-1})

The forward is the chunkwise form of `forward.py` or the recurrence of `recurrent.py`; both save the same states, from which
`backward.py` starts.
"""
