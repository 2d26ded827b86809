from benchmarks.command import run

COMMANDS = {
    name: f'experiments.{name}' for name in (
        'mqar', 'language_modeling', 'extrapolation', 'perplexity', 'plain', 'objectives', 'report', 'pictures',
    )
}

if __name__ == '__main__':
    raise SystemExit(run('experiments', COMMANDS))
