import torch
from fla.ops.longhorn.arguments import TENSORS, Arguments
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
    exact: bool = True,
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
    args = Arguments(
        q=q,
        k=k,
        v=v,
        beta=beta,
        scale=1.0 if scale is None else float(scale),
        initial_state=initial_state,
        output_final_state=output_final_state,
        exact=exact,
        D=D,
        z=z,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        allow_neg_eigval=allow_neg_eigval,
        g=g,
    )
    check_inputs(args)
    return LonghornFunction.apply(*args.differentiable, cu_seqlens, args.without(TENSORS), False)
