"""The patches: which modules of the package's core each brings, and what the trees before it lack.

The first ones have operators, layer and model in fla's own terms, which lie in `written/`. The package's take their place.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from pathlib import Path

from tests.upstream.core import destination
from tests.upstream.fold import Facts, fold, without_unused

WRITTEN = Path(__file__).parent / 'written'


@dataclass(frozen=True)
class Piece:
    """A patch."""

    name: str
    # modules, and packages with those that no other piece has
    modules: tuple[str, ...] = ()
    # what is true of the trees before
    until: Facts = Facts()
    # and in one of their modules
    inside: dict[str, Facts] = field(default_factory=dict)
    # what packages of fla export
    exports: dict[str, tuple[str, ...]] = field(default_factory=dict)


# of every tree: there are no packages beside fla
PLUGIN = Facts(
    conditions={
        'loops is None': True, 'backends.loops is None': True, 'asked': False, "name == 'numba'": False,
        "os.environ.get(CHECK_VALUES) == '1'": False,
    },
    gone=frozenset({'asked', 'loops'}),
    values={'SLOWER': "'fla.ops.longhorn.naive_recurrent_longhorn, which is slower'"},
    unsaid=r'FLA_LONGHORN|docs/|\ba package',
)
PIECES = (
    Piece(
        'the exact form, with a decay per head',
        ('ops.arguments', 'ops.checkpoints', 'ops.triton'),
        exports={
            'fla.ops': ('chunk_longhorn', 'fused_recurrent_longhorn'),
            'fla.layers': ('Longhorn',),
            'fla.models': ('LonghornConfig', 'LonghornForCausalLM', 'LonghornModel'),
        },
    ),
    Piece('decays per channel', until=Facts(
        conditions={
            'PER_CHANNEL': False, 'per_channel': False, 'self.per_channel': False, "gate == 'channel'": False,
            'SCALAR_G': 'g is not None', 'g.dim() == 3': True, 'g.dim() == 4': False,
        },
        gone=frozenset({'channel', 'g_per_channel', 'per_channel', 'ps'}),
        unsaid=r'(gate|decay|decays.*|g|one) per channel|decayed_|`ps`',
    ), inside={'ops.triton.exact.backward': Facts(gone=frozenset({'i_end'}))}),
    Piece("the kernels in the layout of tensor cores", ('ops.triton.exact.mma',), Facts(
        conditions={'has_lanes()': False, 'lanes': False, 'lanes_replay': False},
        unsaid='`mma`',
    )),
    Piece('the diagonal form', ('ops.triton.diagonal',), Facts(
        conditions={'args.exact': True, 'exact': True},
        gone=frozenset({'exact'}),
        unsaid='diagonal/|diagonal form',
    )),
    Piece('operators of torch.library, with a backend in PyTorch', ('ops', 'ops.triton.exact.mma.walk'), Facts(
        # updates that are kept for backward
        conditions={
            'updates is None': True, 'ends is None': True, 'RESIDUALS': True, 'VALUES': True,
            'given': False, 'walk': False, 'KEPT': False, 'GIVEN': False,
        },
        gone=frozenset({
            'disable_recompute', 'updates', 'given', 'walk', 'ends', 'KEPT', 'GIVEN', 'RESIDUALS', 'VALUES',
        }),
        absent=frozenset({'cu_seqlens_cpu', 'naive_chunk_longhorn', 'return_intermediate_states'}),
        unsaid='GIVEN|`updates|behind the sequences|backward sees',
    )),
    Piece('pools of states', ('ops.pool', 'ops.update'), Facts(
        conditions={'pool is None': True, 'POOLED': False, 'pooled': False},
        gone=frozenset({
            'pool', 'pooled', 'POOLED', 'state_indices', 'final_state_indices', 'has_initial_state', 'pad_slot_id', 's_h',
            'row_arguments',
        }),
        values={'s_h': '(H * K * V)'},
        absent=frozenset({'longhorn_state_update'}),
        unsaid=r'POOLED|\bpool\b|longhorn_state_update',
    ), inside={'ops.triton.diagonal.segments': Facts(values={'s_h': '(H * KV)'})}),
    Piece('context parallelism', ('ops.context_parallel', 'ops.triton.diagonal.summaries'), Facts(
        conditions={'cp_context is None': True},
        gone=frozenset({'cp_context'}),
        absent=frozenset({'FLACPContext', 'run_rank', 'summaries'}),
        unsaid='cp_context|context parallelism|context_parallel',
    )),
    Piece('the whole layer', ('layers', 'modules')),
    Piece('the whole models', ('models',), exports={
        'fla.models': ('LonghornForSequenceClassification', 'LonghornForTokenClassification'),
    }),
)
# lists of fla's repository, which its distributions lack: the line before which something is added, and that
INSERTED = {
    'README.md': [('| 2024  |        Mamba2 ', WRITTEN / 'readme.txt')],
    'benchmarks/ops/registry.py': [('# --- +gate + beta ---\n', WRITTEN / 'registry.txt')],
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


def piece_of(module: str) -> int:
    """The number of the piece, from 0, that brings a module of the core: the longest name decides."""
    numbers = {f'fla_longhorn.{name}': number for number, piece in enumerate(PIECES) for name in piece.modules}
    while module not in numbers:
        module = module.rpartition('.')[0]
    return numbers[module]


def texts_of(core: dict[str, str], number: int) -> dict[str, str]:
    """Place -> text, of all modules and tests of Longhorn in the tree of a piece."""
    later = PIECES[number + 1:]
    facts = reduce(or_, (piece.until for piece in later), PLUGIN)
    texts = {}
    for path in sorted(WRITTEN.rglob('*.py')):
        texts[str(path.relative_to(WRITTEN))] = fold(path.read_text(encoding='utf-8'), facts)
    for module, text in core.items():
        if piece_of(module) <= number:
            inside = (piece.inside.get(module.partition('.')[2], Facts()) for piece in later)
            texts[str(destination(module))] = fold(text, reduce(or_, inside, facts))
    texts = without_unused(texts)
    return {place: text for place, text in texts.items() if place.startswith('fla/') or 'def test_' in text}


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
