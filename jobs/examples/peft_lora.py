"""LoRA by peft with any strategy: only the adapters are trained and exchanged. On scikit-learn's handwritten digits.

    mpirun -n 4 python jobs/examples/peft_lora.py --strategy gossip_pull --output adapters

Three lines are hpcdist's: `hd.init`, `hd.DistributedOptimizer` and `hd.shard`; `hd.finish` gives all ranks the result.
"""

import argparse
from collections.abc import Sequence

import torch
from peft import LoraConfig, get_peft_model
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hpcdist as hd


def main(arguments: Sequence[str] | None = None) -> nn.Module:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="allreduce", help="see `hpcdist strategies`")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32, help="of each rank")
    parser.add_argument("--output", help="folder for the trained adapters")
    chosen = parser.parse_args(arguments)

    hd.init()
    torch.manual_seed(0)
    x, y = (torch.from_numpy(values) for values in load_digits(return_X_y=True))
    base = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))  # in place of a trained model
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["0"], modules_to_save=["2"]))
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    optimizer = hd.DistributedOptimizer(optimizer, model, strategy=chosen.strategy)
    data = TensorDataset(x.to(torch.get_default_dtype()) / 16, y)
    loader = hd.shard(DataLoader(data, chosen.batch_size))

    for _ in range(chosen.epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
    hd.finish(model)
    if chosen.output and hd.is_main():
        model.save_pretrained(chosen.output)
    return model


if __name__ == "__main__":
    main()
