from benchmarks.command import run

COMMANDS = {
    'ops': 'benchmarks.ops.run', 'model': 'benchmarks.models.run', 'serving': 'benchmarks.models.serving',
    'arrivals': 'benchmarks.models.arrivals', 'serving-parts': 'benchmarks.models.serving_parts',
    'kernels': 'benchmarks.kernels.run', 'launches': 'benchmarks.kernels.launches', 'traffic': 'benchmarks.kernels.traffic',
    'decoding': 'benchmarks.kernels.decoding', 'host': 'benchmarks.host', 'memory': 'benchmarks.memory',
    'passes': 'benchmarks.passes', 'predict': 'benchmarks.predict.run', 'calibrate': 'benchmarks.predict.calibrate',
    'all': 'benchmarks.all',
    'report': 'benchmarks.report.page', 'pictures': 'benchmarks.report.pictures',
}

if __name__ == '__main__':
    raise SystemExit(run('benchmarks', COMMANDS))
