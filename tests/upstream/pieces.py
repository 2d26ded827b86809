"""What the patches to fla before the last have: the exact kernels, and operators, layer and model in fla's own terms.

The kernels are the package's, without what a patch lacks: the diagonal form, pools of states and context parallelism, in the
first two the kernels in the layout of tensor cores, in the first decays per channel. Nor have they updates that are kept.
`first/` has the rest.
"""

from __future__ import annotations

from dataclasses import replace
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
# of every piece but the last
FACTS = Facts(
    conditions={
        'args.exact': True,
        'pool is None': True,
        'POOLED': False,
        'updates is None': True,
        'given': False,
        'walk': False,
        'KEPT': False,
        'GIVEN': False,
        'RESIDUALS': True,
        'VALUES': True,
        'ends is None': True,
    },
    gone=frozenset({
        'disable_recompute', 'updates', 'given', 'walk', 'kept', 'ends', 'KEPT', 'GIVEN', 'RESIDUALS', 'VALUES',
        'exact', 'pool', 'POOLED', 'state_indices', 'final_state_indices', 'has_initial_state', 'pad_slot_id', 's_h',
        'row_arguments',
    }),
    values={'s_h': '(H * K * V)', 'SLOWER': "'fla.ops.longhorn.naive_recurrent_longhorn, which is slower'"},
    unsaid=r'GIVEN|`kept`|`updates|behind the sequences|backward sees|POOLED|\bpool\b|diagonal/|context parallelism',
)
# until the second piece, and until the third
PER_HEAD = Facts(
    conditions={
        'PER_CHANNEL': False,
        'per_channel': False,
        'SCALAR_G': 'g is not None',
        'g.dim() == 3': True,
        'g.dim() == 4': False,
    },
    gone=frozenset({'per_channel', 'ps'}),
    unsaid=r'(gate|decay|decays.*|g|one) per channel|decayed_|`ps`',
)
TILES = Facts(conditions={'has_lanes(key, x.g)': False, 'lanes': False, 'lanes_replay': False}, unsaid='`mma`')
PIECES = (FACTS | PER_HEAD | TILES, FACTS | TILES, FACTS)
# the hand-written files of the first piece, in the second
CHANNEL = FIRST / 'channel.diff'
# and in the last, beside those that the package has
DIAGONAL = FIRST / 'diagonal.diff'
MMA = f'{OPS}.triton.exact.mma'
# module -> what nothing reads in it until the second piece
UNREAD = {'triton.exact.backward': {'i_end'}}
EXPORTS = {
    'fla.ops': ('chunk_longhorn', 'fused_recurrent_longhorn'),
    'fla.layers': ('Longhorn',),
    'fla.models': ('LonghornConfig', 'LonghornForCausalLM', 'LonghornModel'),
}
# lists of fla's repository, which its distributions lack: the line before which something is added, and that
INSERTED = {
    'README.md': [('| 2024  |        Mamba2 ', FIRST / 'readme.txt')],
    'benchmarks/ops/registry.py': [('# --- +gate + beta ---\n', FIRST / 'registry.txt')],
    'tests/layers/test_attn_varlen_pack_layout.py': [
        ('    MesaNet,\n', '    Longhorn,\n'),
        (
            '        pytest.param(\n            MesaNet,\n',
            '        pytest.param(Longhorn, dict(hidden_size=16, num_heads=2), id="longhorn"),\n',
        ),
    ],
    'tests/layers/test_layer_cache_layer_idx.py': [
        ('from fla.layers.mamba import ', 'from fla.layers.longhorn import Longhorn\n'),
        (
            '    pytest.param(\n        lambda: Mamba(hidden_size=16),\n',
            '    pytest.param(lambda: Longhorn(hidden_size=16), torch.randn(1, 2, 16), id="longhorn"),\n',
        ),
    ],
}


def kernels(core: dict[str, Path], piece: int) -> dict[str, str]:
    """Module -> text, of the modules of the core that a piece but the last has; pieces count from 0."""
    names, texts = [f'{OPS}.{name}' for name in MODULES], {}
    if PIECES[piece] is FACTS:
        names += [x for x in core if (x == MMA or x.startswith(f'{MMA}.')) and x != f'{MMA}.walk']
    for name in names:
        unread = UNREAD.get(name.removeprefix(f'{OPS}.'), set()) if piece == 0 else set()
        facts = replace(PIECES[piece], gone=PIECES[piece].gone | unread)
        texts[name] = fold(core[name].read_text(encoding='utf-8'), facts)
    return without_unused(texts, EXPORTED)


def written(folder: Path) -> dict[str, str]:
    """Place -> text, of what is written for fla, and lies in `folder` as there."""
    return {str(path.relative_to(folder)): path.read_text(encoding='utf-8') for path in sorted(folder.rglob('*.py'))}


def insert(folder: Path) -> list[tuple[str, str]]:
    """Add Longhorn to fla's lists; the file and the line of each place that is not there once."""
    missing = []
    for name, places in INSERTED.items():
        path = folder / name
        if not path.exists():
            continue
        for line, added in places:
            text = path.read_text(encoding='utf-8')
            if text.count('\n' + line) == 1:
                before, after = text.split('\n' + line)
                added = added if isinstance(added, str) else added.read_text(encoding='utf-8')
                path.write_text(f'{before}\n{added}{line}{after}', encoding='utf-8')
            else:
                missing.append((name, line))
    return missing
