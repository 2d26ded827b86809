"""Triton's PTX, executed without a GPU.

Triton's interpreter runs a kernel's Python. A GPU runs what the compiler made of it: layouts, conversions through shared
memory, barriers, fragments of matrix products, masks as predicates. `offgpu.emulator` executes that code. It takes each
launch of a kernel on CPU tensors, has Triton compile it for sm_90 or sm_80 up to PTX, and runs the PTX in NumPy over the whole
grid. So a call of a public operator, forward and backward, goes through the compiled code, and is compared with the naive
operator in float64.

What is checked, as compute-sanitizer does:

- memcheck: each global access lies in a storage of the launch's arguments and in an element of one of its tensors, each
  shared one in what the block asked for, all aligned. Every buffer has an address range of its own.
- racecheck, for every byte that threads share: two blocks that touch it while one writes; two warps of a block between two
  `bar.sync`; two lanes of a warp between two `bar.warp.sync`. Writes of the same value are none.
- initcheck: loads of what nobody wrote, in shared memory and in tensors of `torch.empty`. Those start as NaN, so that a result
  that is right did not use them.
- synccheck: lanes missing at a matrix product, shuffle or barrier; `cp.async` that nobody waits for; operands of `wgmma` that
  are overwritten before the wait, or stored without a fence; its registers used before the wait.

What it is not: `ptxas` comes after the PTX, so registers, spills and time are beyond it. It runs one legal order of events
(three with `--order`). Approximate functions are computed precisely, but for `div.approx`, which is 0 for divisors beyond
2^126. Matrix products sum in float64 and round once. What the emulator does not know (atomics, TMA, clusters, Blackwell's
tensor memory) raises `Unsupported` and is never skipped.
"""
