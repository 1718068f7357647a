"""PyTorch-Ignite's engines with any strategy, on scikit-learn's handwritten digits.

    mpirun -n 4 python jobs/examples/ignite_digits.py --strategy gossip_pull

Three lines are hpcdist's: `hd.init`, `hd.DistributedOptimizer` and `hd.shard`. The engines stay as they are.
"""

import argparse
from collections.abc import Sequence

import torch
from ignite.engine import create_supervised_evaluator, create_supervised_trainer
from ignite.metrics import Accuracy
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hpcdist as hd

N_TEST = 360


def main(arguments: Sequence[str] | None = None) -> nn.Module:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="allreduce", help="see `hpcdist strategies`")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=32, help="of each rank")
    chosen = parser.parse_args(arguments)

    hd.init()
    torch.manual_seed(0)
    x, y = (torch.from_numpy(values) for values in load_digits(return_X_y=True))
    x = x.to(torch.get_default_dtype()) / 16
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hd.DistributedOptimizer(optimizer, model, strategy=chosen.strategy)
    train = hd.shard(DataLoader(TensorDataset(x[N_TEST:], y[N_TEST:]), chosen.batch_size))
    test = hd.shard(DataLoader(TensorDataset(x[:N_TEST], y[:N_TEST]), chosen.batch_size), training=False)

    trainer = create_supervised_trainer(model, optimizer, nn.functional.cross_entropy)
    evaluator = create_supervised_evaluator(model, {"accuracy": Accuracy()})

    for epoch in range(1, chosen.epochs + 1):
        trainer.run(train, max_epochs=epoch)  # goes on with the next one
        with hd.consensus(model):  # between epochs: a rank that serves can't take part within one
            found = evaluator.run(test)
        print(f"rank {hd.rank()}: epoch {epoch}, accuracy {found.metrics['accuracy']:.4f}")
    hd.finish(model)
    return model


if __name__ == "__main__":
    main()
