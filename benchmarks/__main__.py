from benchmarks.command import run

COMMANDS = {
    'ops': 'benchmarks.ops.run', 'model': 'benchmarks.models.run', 'kernels': 'benchmarks.kernels.run',
    'launches': 'benchmarks.kernels.launches', 'memory': 'benchmarks.memory', 'predict': 'benchmarks.predict.run',
    'calibrate': 'benchmarks.predict.calibrate', 'gpu': 'benchmarks.gpu.run', 'measured': 'benchmarks.report.measured',
}

if __name__ == '__main__':
    raise SystemExit(run('benchmarks', COMMANDS))
