"""Tiny random DeepSeek-V3.2 checkpoints with an MTP layer, and an oracle of what it drafts.

transformers leaves MTP layers out: here one is transformers' own decoder layer behind DeepSeek's projection of the two
norms (arXiv:2412.19437, section 2.2). Knows nothing of eprt.
"""

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests import tiny


class DraftingModel:
    """A model of transformers with its MTP layer. regular: the larger, the more often a token's successor is fixed, so
    that drafts hold."""

    def __init__(self, variant: str = "v32", seed: int = 0, regular: float = 0.5, **overrides: Any):
        num_layers = overrides.pop("num_hidden_layers", 2)
        whole = tiny.make_variant(variant, seed=seed, num_hidden_layers=num_layers + 1, **overrides)
        vocab, hidden = whole.config.vocab_size, whole.config.hidden_size
        with torch.no_grad():
            whole.model.embed_tokens.weight.mul_(regular * hidden**0.5)
            whole.lm_head.weight.copy_(whole.model.embed_tokens.weight[torch.randperm(vocab)] / hidden)
        self.whole, self.num_layers = whole, num_layers
        self.model = copy.deepcopy(whole)
        self.layer = self.model.model.layers[num_layers]
        self.model.model.layers = self.model.model.layers[:num_layers]
        self.model.config.num_hidden_layers = num_layers
        self.enorm, self.hnorm, self.head_norm = (copy.deepcopy(self.model.model.norm) for _ in range(3))
        for norm in (self.enorm, self.hnorm, self.head_norm):
            tiny.randomize(torch.nn.ModuleDict({"norm": norm}))
        self.eh_proj = torch.cat((3 * torch.eye(hidden), torch.randn(hidden, hidden) * hidden**-0.5), dim=1)

    def save(self, directory: Path) -> Path:
        tiny.save(self.whole, directory)
        path, prefix = directory / "model.safetensors", f"model.layers.{self.num_layers}."
        tensors = load_file(path)
        tensors[f"{prefix}eh_proj.weight"] = self.eh_proj
        for name, norm in (("enorm", self.enorm), ("hnorm", self.hnorm), ("shared_head.norm", self.head_norm)):
            tensors[f"{prefix}{name}.weight"] = norm.weight.detach().clone()
        tensors[f"{prefix}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{prefix}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
        save_file(tensors, path, metadata={"format": "pt"})
        config = json.loads((directory / "config.json").read_text())
        config |= {"num_hidden_layers": self.num_layers, "num_nextn_predict_layers": 1}
        for name in ("layer_types", "mlp_layer_types"):
            config.pop(name, None)
        (directory / "config.json").write_text(json.dumps(config))
        return directory

    @torch.no_grad()
    def draft(self, tokens: list[int], num: int) -> list[int]:
        """The next num drafts behind these tokens, the last of which the model has not seen yet."""
        hidden = self.model.model(torch.tensor([tokens[:-1]]), use_cache=False).last_hidden_state[0]
        next_tokens, drafts = tokens[1:], []
        for _ in range(num):
            out = self._pass(hidden, next_tokens)
            drafts.append(int(self.model.lm_head(out[-1]).argmax()))
            hidden, next_tokens = torch.cat((hidden, out[-1:])), [*next_tokens, drafts[-1]]
        return drafts

    def _pass(self, hidden_TH: Tensor, next_tokens: list[int]) -> Tensor:
        embedded = self.enorm(self.model.model.embed_tokens(torch.tensor(next_tokens)))
        x = (torch.cat((embedded, self.hnorm(hidden_TH)), dim=1) @ self.eh_proj.T).unsqueeze(0)
        position = torch.arange(len(next_tokens)).unsqueeze(0)
        angles = self.model.model.rotary_emb(x, position_ids=position)
        mask = torch.full((len(next_tokens), len(next_tokens)), torch.finfo(torch.float32).min).triu(1)[None, None]
        out = self.layer(x, attention_mask=mask, position_ids=position, position_embeddings=angles)
        return self.head_norm((out[0] if isinstance(out, tuple) else out)[0])

    def accepted(self, prompt: list[int], new: list[int], num: int) -> list[int]:
        """Of each step that decodes: how many of its drafts are the tokens that greedy decoding gives, `new`."""
        done, counts = 1, []
        while done < len(new):
            drafts = self.draft([*prompt, *new[:done]], num)
            held = 0
            while held < num and done + held < len(new) and drafts[held] == new[done + held]:
                held += 1
            counts.append(held)
            done += held + 1
        return counts
