"""Train by any strategy with Hugging Face's Trainer::

hd.init()
trainer = hpcdist.hf.Trainer(model, args, train_dataset=data, strategy="gossip_pull")
trainer.train()
"""

from hpcdist.errors import require_packages

require_packages("hpcdist.hf", "hf", "transformers", "accelerate")

from hpcdist.hf.trainer import Trainer, TrainerMixin  # noqa: E402

__all__ = ["Trainer", "TrainerMixin"]
