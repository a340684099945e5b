"""On-demand communication for PyTorch Lightning: sharded training without a barrier at every layer.

Importing this package registers the strategy: ``import lightning_odc``, then ``Trainer(strategy="odc")``.
"""

from lightning_odc._registration import register
from lightning_odc._version import __version__
from lightning_odc.data.loader import BalancedDataLoader
from lightning_odc.data.minibatch import Minibatch
from lightning_odc.strategy.odc import ODCStrategy

register()

__all__ = ["BalancedDataLoader", "Minibatch", "ODCStrategy", "__version__"]
