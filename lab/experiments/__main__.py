from benchmarks.command import run
from fla_longhorn_cpu.attention import use_pytorch_attention

COMMANDS = {
    name: f'lab.experiments.{name}' for name in (
        'mqar', 'language_modeling', 'extrapolation',
    )
}

if __name__ == '__main__':
    # fla's Transformer is among the models
    use_pytorch_attention()
    raise SystemExit(run('lab.experiments', COMMANDS))
