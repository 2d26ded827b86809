"""Classification of sequences and tokens: transformers' heads on :class:`LonghornModel`.

Their losses are means over a batch. `accepts_loss_kwargs` lets the Trainer divide them by the number of batches whose
gradients it adds, not by their labels.
"""

from __future__ import annotations

from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification

from fla_longhorn.models.longhorn.modeling_longhorn import LonghornPreTrainedModel


class LonghornForSequenceClassification(GenericForSequenceClassification, LonghornPreTrainedModel):
    """Scores `[B, num_labels]` of each row's last token that is not `config.pad_token_id`, with padding on either side."""

    accepts_loss_kwargs = False


class LonghornForTokenClassification(GenericForTokenClassification, LonghornPreTrainedModel):
    """Scores `[B, T, num_labels]`."""

    accepts_loss_kwargs = False
