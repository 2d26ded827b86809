"""The diagonal update (arXiv 2407.14207, Eq. 7) in Triton.

Names: S state, P state after its decay, k key, q query, v value, g logarithm of the decay, eps step size, n |k|^2, y output
before D and z. A *segment* of a sequence is processed by itself, from the state that enters it; a *slice* of all segments is
what one launch of backward processes; an *interval* lies between two states saved for backward; a *block* of tokens is loaded
together, one block ahead.

Sizes: `L` tokens in a segment, `TS` in a slice, `INTERVAL` in an interval, `U` in a block; `NS` segments, `N` sequences; `KP`
is K padded to a power of two; a program has `BK` of `NK * BK` entries of K, and `BV` of V channels, in `NV` programs. `S_X` is
the stride of x between tokens. `kq` has a row for each token and head: k, scale * q, |k|^2 and padding to 16 bytes.
"""
