"""What a first patch to fla has: the exact kernels with one decay per head, and operators, layer and model in fla's own terms.

The kernels are the package's, without what the first patch lacks: the diagonal form, pools of states, decays per channel,
context parallelism, the kernels in the layout of tensor cores. `first/` has the rest.
"""

from __future__ import annotations

from pathlib import Path

from tests.upstream.fold import Facts, fold, without_unused

FIRST = Path(__file__).parent / 'first'
OPS = 'fla_longhorn.ops'
MODULES = (
    'arguments', 'checkpoints', 'triton', 'triton.common', 'triton.device', 'triton.launch', 'triton.slots', 'triton.exact',
    'triton.exact.backward', 'triton.exact.backward_qk', 'triton.exact.common', 'triton.exact.configs', 'triton.exact.forward',
    'triton.exact.gram', 'triton.exact.recurrent', 'triton.exact.replay', 'triton.exact.state',
)
# what other files name
EXPORTED = ('Arguments', 'longhorn_bwd', 'longhorn_fwd')
FACTS = Facts(
    conditions={
        'args.exact': True,
        'pool is None': True,
        'POOLED': False,
        'PER_CHANNEL': False,
        'per_channel': False,
        'SCALAR_G': 'g is not None',
        'g.dim() == 3': True,
        'g.dim() == 4': False,
        'has_lanes(key, x.g)': False,
        'lanes': False,
        'lanes_replay': False,
    },
    gone=frozenset({
        'exact', 'pool', 'POOLED', 'state_indices', 'final_state_indices', 'has_initial_state', 'pad_slot_id', 's_h',
        'row_arguments', 'per_channel', 'ps',
    }),
    values={'s_h': '(H * K * V)', 'SLOWER': "'fla.ops.longhorn.naive_recurrent_longhorn, which is slower'"},
    unsaid=r'POOLED|\bpool\b|(gate|decay|decays.*|g|one) per channel|decayed_|`ps`|`mma`|diagonal/|context parallelism',
)
# folders and files of `first` -> their places
PLACES = {
    'ops': 'fla/ops/longhorn',
    'layers': 'fla/layers',
    'models': 'fla/models/longhorn',
    'tests_of_ops.py': 'tests/ops/test_longhorn.py',
    'tests_of_models.py': 'tests/models/test_modeling_longhorn.py',
}
EXPORTS = {
    'fla.ops': ('chunk_longhorn', 'fused_recurrent_longhorn'),
    'fla.layers': ('Longhorn',),
    'fla.models': ('LonghornConfig', 'LonghornForCausalLM', 'LonghornModel'),
}
REGISTRY, GROUP = 'benchmarks/ops/registry.py', '# --- +gate + beta ---\n'


def first_kernels(core: dict[str, Path]) -> dict[str, str]:
    """Module -> text, of the modules of the core that the first patch has."""
    chosen = {f'{OPS}.{name}': core[f'{OPS}.{name}'] for name in MODULES}
    return without_unused({name: fold(path.read_text(encoding='utf-8'), FACTS) for name, path in chosen.items()}, EXPORTED)


def first_files() -> dict[str, str]:
    """Place -> text, of what is written for fla."""
    files = {}
    for name, place in PLACES.items():
        path = FIRST / name
        for file in [path] if path.is_file() else sorted(path.glob('*.py')):
            files[place if path.is_file() else f'{place}/{file.name}'] = file.read_text(encoding='utf-8')
    return files


def register_benchmark(folder: Path) -> None:
    """Add the operator to fla's benchmarks, which its distributions lack and its repository has."""
    path = folder / REGISTRY
    if path.exists():
        text = path.read_text(encoding='utf-8')
        if text.count(GROUP) != 1:
            raise SystemExit(f'{REGISTRY} must have the line {GROUP!r}, before which chunk_longhorn is registered')
        path.write_text(text.replace(GROUP, (FIRST / 'registry.txt').read_text(encoding='utf-8') + GROUP), encoding='utf-8')
