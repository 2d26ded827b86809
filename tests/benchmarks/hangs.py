"""A stage that hangs, beside `faults`."""

import time


def items(device):
    return ['hangs']


def run(item, device):
    time.sleep(600)
    yield {}
