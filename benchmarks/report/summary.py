"""The part of the README that `python -m benchmarks.report` draws from the committed figures."""

from __future__ import annotations

from statistics import mean

from benchmarks.experiments.mqar import summarize

START, END = '<!-- drawn by python -m benchmarks.report -->\n', '<!-- to here -->\n'
# (operator, backend) in the README, of those measured on a CPU
OPERATORS = (
    ('chunk_longhorn', 'numba'), ('chunk_longhorn exact', 'numba'), ('chunk_longhorn', 'torch'),
    ('naive_recurrent_longhorn', 'naive'), ('mamba2_chunk_scan', 'transformers'), ('delta_rule_chunkwise', 'naive'),
)
WIDTH = 32


def table(columns: list[str], rows: list[list]) -> str:
    lines = ['| ' + ' | '.join(columns) + ' |', '|' + ' --- |' * len(columns)]
    return '\n'.join(lines + ['| ' + ' | '.join(map(str, row)) + ' |' for row in rows])


def operators(report: dict) -> str:
    """Training passes at the paper's 120M shape."""
    found = [row for row in report['rows'] if row['set'] == 'paper' and row['V'] == 1536 and row['status'] == 'ok']
    times = {(row['operator'], row['backend']): row['forward_backward'] for row in found}
    rows = [
        [f'{name} ({backend})', f'{times[name, backend]["ms"]:.1f}', f'{times[name, backend]["of_longhorn"]:.1f}x']
        for name, backend in OPERATORS if (name, backend) in times
    ]
    machine = report['machine']
    return (f'Operators, {machine["device"]}, {machine["threads"]} threads, {report["dtype"]}, forward + backward at '
            f'{found[0]["shape"]}:\n\n' + table(['operator', 'ms', 'of `chunk_longhorn`'], rows))


def kernels(rows: list[dict]) -> str:
    """Both updates on one target."""
    sizes = list(dict.fromkeys(row['K'] for row in rows))

    def cost(update: str, direction: str, K: int) -> str:
        some = [x for x in rows if (x['target'], x['update'], x['pass'], x['K']) == ('sm_90', update, direction, K)]
        spills = sum(x['spills'] for x in some)
        cell = f'{K * sum(x["instructions_per_state_update"] for x in some):.0f}'
        return cell + (f' ({spills} spills)' if spills else '')

    lines = [
        [f'{update}, {direction}', *(cost(update, direction, K) for K in sizes)]
        for update in ('diagonal', 'exact') for direction in ('forward', 'backward')
    ]
    return ('Kernels compiled for sm_90, bfloat16: instructions of a lane for a token and channel, all K entries of its state '
            'together, states saved, without gate and logits:\n\n' + table(['update', *(f'K = {K}' for K in sizes)], lines))


def learning(recalls: dict, losses: dict, long: dict) -> str:
    """What the mixers learn, a line each."""
    grid = summarize(recalls['runs'], ['mixer', 'seq_len', 'hidden_size'])
    lengths = sorted({row['seq_len'] for row in grid})
    found = {(row['mixer'], row['seq_len']): row['mean'] for row in grid if row['hidden_size'] == WIDTH}
    lines = []
    for model in dict.fromkeys(run['model'] for run in losses['runs']):
        mixer = model.removeprefix('Longhorn, ')
        loss = mean(run['loss'] for run in losses['runs'] if run['model'] == model)
        perplexity = [mean(run['spans'][i]['perplexity'] for run in long['runs'] if run['model'] == model) for i in (0, -1)]
        recall = [f'{found[mixer, length]:.0%}' if (mixer, length) in found else '' for length in lengths]
        lines.append([model, *recall, f'{loss:.3f}', *(f'{x:.2f}' for x in perplexity)])
    ends = [long['runs'][0]['spans'][i]['end'] for i in (0, -1)]
    columns = ['mixer', *(f'recall, {length} tokens' for length in lengths), 'loss',
               *(f'perplexity up to {end}' for end in ends)]
    steps, more = recalls['setting']['options']['steps'], losses['setting']['training']['max_steps']
    return (
        f'What small models learn: associative recall (width {WIDTH}, {steps} steps; attention in two layers, the others in '
        f'one), and bytes of Python sources ({more} steps of {long["block_size"]} bytes): '
        f'held-out loss in nats, and perplexity at the training length and {round(ends[1] / ends[0])} times past it; means '
        'over seeds:\n\n' + table(columns, lines) + '\n\n![Perplexity by position](benchmarks/results/extrapolation.png)'
    )


def summary(read, timed_on_gpu: bool) -> str:
    """The text between the marks; `read` gives a file's figures by its name."""
    missing = ("models of the paper's sizes" if timed_on_gpu else "times on any GPU, and models of the paper's sizes")
    parts = [
        operators(read('cpu_ops')), kernels(read('kernels')),
        learning(read('mqar_small'), read('lm_small'), read('extrapolation')),
        f'Not measured: {missing}. [All results](docs/results.md), with devices, '
        'versions, spreads and pictures; [the ablations](docs/results.md#ablations); [Table 4](docs/objectives.md).',
    ]
    return START + '\n\n'.join(parts) + '\n' + END


def replaced(text: str, drawn: str) -> str:
    """`text` with what lies between the marks drawn anew."""
    return text[:text.index(START)] + drawn + text[text.index(END) + len(END):]
