"""The mutations, by the folder of the package that they change."""

from tests.mutate.rooms import cpu, layers, models, numba, ops, torch, triton

ROOMS = {
    'ops': ops.MUTATIONS,
    'numba': numba.MUTATIONS,
    'torch': torch.MUTATIONS,
    'triton': triton.MUTATIONS,
    'cpu': cpu.MUTATIONS,
    'layers': layers.MUTATIONS,
    'models': models.MUTATIONS,
}
# by `room/name`
MUTATIONS = {f'{room}/{mutation.name}': mutation for room, mutations in ROOMS.items() for mutation in mutations}
