"""Other people's trainers, models and loaders, which leave the optimiser to the script: the real packages."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import SGD

import hpcdist as hd
from harness import loops
from patterns import groups
from patterns.run import BATCH, EPOCHS, data, mse, net, pattern, sgd, train

WITHOUT_SERVERS = [name for name in groups.CONTRACTS if name not in groups.SERVED]


@pattern(needs="ignite", where=WITHOUT_SERVERS)
def an_engine_of_ignite(run):
    """Goes on with the next epoch at each call; it asks a loader without batches twice, as a server's is."""
    from ignite.engine import create_supervised_trainer

    model, loader = net(), run.loader()
    trainer = create_supervised_trainer(model, sgd(run, model, momentum=0.9), mse)
    for epoch in range(1, EPOCHS + 1):
        trainer.run(loader, max_epochs=epoch)
    return run.finish(model)


@pattern(needs="peft")
def adapters_of_peft(run):
    """Only they are trained."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(net(), LoraConfig(r=2, target_modules=["0"])).double()
    frozen = [p.clone() for p in model.parameters() if not p.requires_grad]
    optimizer = run.optimizer(SGD((p for p in model.parameters() if p.requires_grad), lr=0.1), model)
    train(run, model, optimizer, run.loader())
    assert all(map(torch.equal, frozen, (p for p in model.parameters() if not p.requires_grad)))
    return run.finish(model)


@pattern(needs="torch_geometric", ways=("joint", "one", "many"))
def graphs_of_torch_geometric(run):
    """In batches by its own loader."""
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader
    from torch_geometric.nn import GCNConv, global_mean_pool

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = GCNConv(1, 4).double(), nn.Linear(4, 1).double()

        def forward(self, batch):
            return self.last(global_mean_pool(self.first(batch.x, batch.edge_index).tanh(), batch.batch))

    ring = torch.stack([torch.arange(5), torch.arange(1, 6) % 5])
    graphs = [Data(x=x.reshape(5, 1), edge_index=ring, y=y.reshape(1, 1)) for x, y in data()]
    torch.manual_seed(0)
    model = Network()
    loader = DataLoader(graphs, batch_size=BATCH * (run.joint if run.size == 1 else 1))
    optimizer, batches = sgd(run, model), loader if run.size == 1 else hd.shard(loader)
    for _ in range(EPOCHS):
        loops.steps(optimizer, batches, lambda batch: mse(model(batch), batch.y).backward())
    return run.finish(model)
