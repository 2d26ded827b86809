"""The exact update in the layout of tensor cores: bfloat16 on CUDA, up to 128 entries, without a gate or with one per head.

A product's rows are channels, its columns tokens, so that the accumulators of one are an operand of the next, and nothing
moves between lanes but the tiles that are loaded and stored. `lanes.py` says which numbers a lane holds, `operands.py` writes
the small operands in that order, once for all channels. A chunk has 16 tokens, in two halves. With h = -S, -K, -A and -L no
product needs a sign.
"""
