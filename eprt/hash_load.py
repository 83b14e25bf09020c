"""eprt hash-load: the expert load of a model's hash layers, from text alone, for `eprt balance plan`.

    eprt hash-load path/to/DeepSeek-V4-Flash corpus.txt --out load.json
    eprt balance plan --load load.json --num-gpus 4 --num-slots 288 --out placement.json

In a hash layer (gate.tid2eid) the token id alone chooses the experts. So how often tokens occur says what each expert
gets, before any request came. Of other layers nothing is known: their experts count as even.

Knows nothing of plans.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from eprt.engine.tokenizer import Tokenizer
from eprt.models.checkpoint import Checkpoint
from eprt.models.config_file import ConfigFile


def count_tokens(model_dir: Path, texts: Sequence[Path], num_tokens: int) -> np.ndarray:
    """int64 [num_tokens]: how often each token is in these files. ValueError for one that is not UTF-8, or a token
    beyond the model's vocabulary."""
    tokenizer, count_V = Tokenizer(model_dir), np.zeros(num_tokens, np.int64)
    for path in texts:
        try:
            text = path.read_text(encoding="utf-8")
            ids = np.array(tokenizer.encode(text) if text else (), np.int64)
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not UTF-8: {error}") from None
        except OSError as error:
            raise ValueError(f"{path}: cannot be read: {error.strerror or error}") from None
        if len(ids) and ids.max() >= num_tokens:
            raise ValueError(
                f"{path}: token {ids.max()}, but the model has {num_tokens}: is it this model's tokenizer?"
            )
        count_V += np.bincount(ids, minlength=num_tokens)
    if not count_V.any():
        raise ValueError(f"{', '.join(map(str, texts))}: no tokens")
    return count_V


def hash_load(model_dir: Path, count_V: np.ndarray, num_extra_layers: int = 0) -> np.ndarray:
    """float64 [layers, experts]: the tokens that each expert gets of these.

    num_extra_layers: behind the model's own, as one for its MTP layer. ValueError where no layer is routed by token id.
    """
    file = ConfigFile(model_dir / "config.json")
    num_layers, num_experts = file.size("num_hidden_layers"), file.size("n_routed_experts")
    top_k, num_hashed = file.size("num_experts_per_tok"), file.integer("num_hash_layers", 0)
    if not num_hashed:
        raise ValueError(f"{file.where}: no num_hash_layers: in no layer does the token id alone choose the experts")
    load_LE = np.full((num_layers + num_extra_layers, num_experts), count_V.sum() * top_k / num_experts)
    checkpoint = Checkpoint(model_dir)
    for layer in range(min(num_hashed, num_layers)):
        table_VK = checkpoint.read(f"layers.{layer}.ffn.gate.tid2eid").numpy()
        if table_VK.shape != (len(count_V), top_k):
            raise ValueError(f"layer {layer}: the table is {table_VK.shape}, expected {(len(count_V), top_k)}")
        weights_VK = np.repeat(count_V[:, None], top_k, axis=1)
        load_LE[layer] = np.bincount(table_VK.ravel(), weights_VK.ravel(), num_experts)
    return load_LE


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="eprt hash-load", description=__doc__, formatter_class=formatter)
    parser.add_argument("model", metavar="MODEL", type=Path, help="directory of the checkpoint")
    parser.add_argument("text", metavar="FILE", type=Path, nargs="+", help="text like that which will be served, UTF-8")
    parser.add_argument("--out", metavar="FILE", type=Path, help="where to write the load; default: standard output")
    parser.add_argument("--drafts", action="store_true", help="the server will draft: a row more, of its MTP layer")
    arguments = parser.parse_args(argv)
    try:
        num_tokens = ConfigFile(arguments.model / "config.json").size("vocab_size")
        count_V = count_tokens(arguments.model, arguments.text, num_tokens)
        load_LE = hash_load(arguments.model, count_V, int(arguments.drafts))
        text = json.dumps({"load": load_LE.tolist()}) + "\n"
        if arguments.out is None:
            sys.stdout.write(text)
        else:
            arguments.out.write_text(text)
            most = (load_LE.max(axis=1) / load_LE.mean(axis=1)).max()
            print(f"wrote {arguments.out}: {count_V.sum()} tokens, most loaded expert {most:.2f} times the mean")
    except BrokenPipeError:  # `eprt` knows of readers that have seen enough
        raise
    except (ValueError, OSError) as error:
        print(f"eprt hash-load: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    from eprt import cli

    sys.exit(cli.main(["hash-load", *sys.argv[1:]]))
