"""Train by any strategy with Hugging Face's Trainer::

hd.init()
trainer = hpcdist.hf.Trainer(model, args, train_dataset=data, strategy="gossip_pull")
trainer.train()
"""

try:
    import accelerate  # noqa: F401
    import transformers  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"hpcdist.hf must have the packages transformers and accelerate; got no {error.name}. Install them with "
        "`pip install hpcdist[hf]`."
    ) from error

from hpcdist.hf.trainer import Trainer, TrainerMixin

__all__ = ["Trainer", "TrainerMixin"]
