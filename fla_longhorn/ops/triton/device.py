"""The device that kernels run on, as far as launch parameters depend on it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
from triton import knobs

# whether Triton's asynchronous copies are usable: up to 3.6 there is no fence between a copy and a warp group's product that
# reads it, and tiles with short rows are copied in branches
ASYNC_COPIES = tuple(map(int, re.findall(r'\d+', triton.__version__)[:2])) >= (3, 7)


# what errors recommend where kernels cannot run
SLOWER = 'FLA_LONGHORN_BACKEND=torch, which is slower'


@dataclass(frozen=True)
class Card:
    """What a device has, and which of its instructions Triton makes of a product.

    `shared_memory` is in bytes for a block, `registers` in 32-bit registers of a multiprocessor. With `warp_groups`, four
    warps multiply together and read operands from shared memory (sm_90). With `tensor_memory` they also hold their sums
    outside registers (sm_100). Others have neither, RTX cards of any generation (sm_120) too.
    """

    name: str
    backend: str
    shared_memory: int
    registers: int = 65536
    multiprocessors: int = 1
    warp_groups: bool = False
    tensor_memory: bool = False

    @property
    def mma(self) -> bool:
        """Whether a product is one warp's, with operands in its registers."""
        return self.backend == 'cuda' and not (self.warp_groups or self.tensor_memory)


# Triton's interpreter takes an H100's parameters, with few programs
INTERPRETED = Card('interpreter', 'cuda', 232448, multiprocessors=4, warp_groups=True)


def make_card(target: Any, properties: dict[str, int]) -> Card:
    """The card of a compile target of Triton and the driver's properties of its device."""
    name = f'sm_{target.arch}' if target.backend == 'cuda' else str(target.arch)
    capability = target.arch if target.backend == 'cuda' else 0
    if 0 < capability < 80:
        raise ValueError(
            f'q is on a GPU of compute capability {capability / 10}, for which Longhorn has no Triton kernels; '
            f'they need 8.0 (Ampere) or later; use {SLOWER}',
        )
    return Card(
        name, target.backend, properties['max_shared_mem'], properties.get('max_num_regs', 65536),
        # Triton has instructions for these alone: sm_110, sm_120 and sm_121 multiply like sm_80
        properties['multiprocessor_count'], warp_groups=90 <= capability < 100, tensor_memory=100 <= capability < 110,
    )


@lru_cache(64)
def _card(driver: Any, index: int | None) -> Card:
    return make_card(driver.get_current_target(), driver.utils.get_device_properties(index))


def card_of(device: torch.device) -> Card:
    """The card of the current device, which `device` is."""
    if device.type == 'cpu' and knobs.runtime.interpret:
        return INTERPRETED
    return _card(triton.runtime.driver.active, device.index)
