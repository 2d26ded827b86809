"""A stage that hangs, beside `faults`."""

import time


def items(device):
    return ['hangs', 'works']


def run(item, device):
    time.sleep(600 * (item == 'hangs'))
    yield {}
