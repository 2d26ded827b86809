from benchmarks.command import run

COMMANDS = {
    'ops': 'benchmarks.ops.run', 'model': 'benchmarks.models.run', 'serving': 'benchmarks.models.serving',
    'arrivals': 'benchmarks.models.arrivals', 'serving-parts': 'benchmarks.models.serving_parts',
    'kernels': 'benchmarks.kernels.run', 'launches': 'benchmarks.kernels.launches', 'cards': 'benchmarks.kernels.cards',
    'traffic': 'benchmarks.kernels.traffic',
    'decoding': 'benchmarks.kernels.decoding', 'waits': 'benchmarks.waits', 'memory': 'benchmarks.memory',
    'recompute': 'benchmarks.recompute',
    'predict': 'benchmarks.predict.command:benchmarks.predict.run',
    'layers': 'benchmarks.predict.command:benchmarks.predict.layers',
    'calibrate': 'benchmarks.calibration.run', 'gpu': 'benchmarks.gpu.run',
    'report': 'benchmarks.report.page', 'pictures': 'benchmarks.report.pictures',
}

if __name__ == '__main__':
    raise SystemExit(run('benchmarks', COMMANDS))
