import torch
from fla.ops.longhorn.chunk import LonghornFunction, check_inputs


@torch.compiler.disable
def fused_recurrent_longhorn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.LongTensor | None = None,
    allow_neg_eigval: bool = False,
    g: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    r"""
    Longhorn token by token in one launch, for decoding and short sequences.
    Arguments and results are those of `chunk_longhorn`, and so is the backward pass.
    """
    check_inputs(q, v, beta, initial_state, D, z, state_v_first, cu_seqlens, g)
    return LonghornFunction.apply(
        q,
        k,
        v,
        beta,
        1.0 if scale is None else float(scale),
        initial_state,
        output_final_state,
        D,
        z,
        use_beta_sigmoid_in_kernel,
        state_v_first,
        cu_seqlens,
        allow_neg_eigval,
        g,
        False,
    )
