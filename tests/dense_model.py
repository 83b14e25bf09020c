"""DenseModel: a Model without MoE layers, for made-up models of tests."""

import torch

from eprt.ep.exchange import Exchange
from eprt.models.model import Model


class DenseModel(Model):
    """Subclasses have config and forward()."""

    device = torch.device("cpu")
    kv_dtype = torch.float32
    exchange = Exchange({})
