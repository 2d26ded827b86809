"""The mutations, by the folder of the package that they change."""

from importlib.util import find_spec

from tests.mutate.rooms import attn_mode, cpu, lanes, layers, models, numba, onnx, ops, serving, torch, triton, vision

ROOMS = {
    'ops': ops.MUTATIONS,
    'numba': numba.MUTATIONS,
    'torch': torch.MUTATIONS,
    'triton': triton.MUTATIONS,
    'lanes': lanes.MUTATIONS,
    'cpu': cpu.MUTATIONS,
    'layers': layers.MUTATIONS,
    'models': models.MUTATIONS,
    'attn_mode': attn_mode.MUTATIONS,
    # their tests need timm
    **({'vision': vision.MUTATIONS} if find_spec('timm') else {}),
    # vLLM
    **({'serving': serving.MUTATIONS} if find_spec('vllm') else {}),
    # those of this room need onnxruntime
    **({'onnx': onnx.MUTATIONS} if find_spec('onnxruntime') else {}),
}
# each mutation by `room/name`
MUTATIONS = {f'{room}/{mutation.name}': mutation for room, mutations in ROOMS.items() for mutation in mutations}
