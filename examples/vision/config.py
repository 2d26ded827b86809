"""Options of the command, and the models that it compares."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transformers import TimmWrapperConfig

IMAGE_SIZE, CLASSES = 28, 10
# mean and deviation of the digits' grey values
MEAN, STD = [0.1307] * 3, [0.3081] * 3

LONGHORN, VIT = 'vision_longhorn_tiny_patch16_224', 'vit_tiny_patch16_224'
# the ViT has fewer blocks, of two layers each, for as many parameters
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    'both directions, exact': (LONGHORN, dict(embed_dim=64, depth=4, exact=True)),
    'both directions': (LONGHORN, dict(embed_dim=64, depth=4)),
    'one direction': (LONGHORN, dict(embed_dim=64, depth=4, bidirectional=False)),
    'ViT': (VIT, dict(embed_dim=64, depth=4, num_heads=4, mlp_ratio=2.4)),
}


@dataclass(frozen=True)
class RunArguments:
    models: list[str] = field(
        default_factory=lambda: list(MODELS), metadata={'help': 'Rows to train, by their names.', 'choices': list(MODELS)},
    )
    seeds: int = field(default=2, metadata={'help': 'Runs of each model, with seeds 0, 1, ...'})
    epochs: int = field(default=70, metadata={'help': 'Passes over the training images.'})
    batch_size: int = field(default=100, metadata={'help': 'Images in a step.'})
    learning_rate: float = field(default=4e-3, metadata={'help': 'Peak learning rate of AdamW.'})
    weight_decay: float = field(default=0.05, metadata={'help': 'Of AdamW; D, biases, norms and positions are spared.'})
    drop_path_rate: float = field(default=0.1, metadata={'help': 'Share of the last block\'s branches left out in training.'})
    patch_size: int = field(default=7, metadata={'help': 'Height and width of a patch.'})
    train_size: int = field(default=4000, metadata={'help': 'Training images; the others of the 5,000 are held out.'})
    target_accuracy: float = field(default=0.97, metadata={'help': 'Of the first row, below which the command fails.'})
    output_dir: str = field(default='outputs/vision', metadata={'help': 'Where picture, figures and checkpoint go.'})

    def __post_init__(self) -> None:
        for name in ('seeds', 'epochs', 'batch_size', 'patch_size'):
            if getattr(self, name) < 1:
                raise ValueError(f'{name} must be at least 1, got {getattr(self, name)}')
        if IMAGE_SIZE % self.patch_size:
            raise ValueError(f'patch_size must divide {IMAGE_SIZE}, got {self.patch_size}')
        if not 0 < self.train_size < 5000:
            raise ValueError(f'train_size must be between 1 and 4999, got {self.train_size}')

    def model_config(self, name: str) -> TimmWrapperConfig:
        """A timm model's config for transformers, with its image processor's options."""
        architecture, options = MODELS[name]
        return TimmWrapperConfig(
            architecture=architecture,
            num_labels=CLASSES,
            model_args=dict(options, img_size=IMAGE_SIZE, patch_size=self.patch_size, drop_path_rate=self.drop_path_rate),
            pretrained_cfg=dict(
                input_size=[3, IMAGE_SIZE, IMAGE_SIZE], mean=MEAN, std=STD, crop_pct=1., interpolation='bicubic',
            ),
        )
