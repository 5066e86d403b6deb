"""What the folders at a clone's root do when Python, started there, finds them under their bare names.

Their names are ``neuronmm.kernels``, ``neuronmm.compression`` and so on. The bare names belong to others: transformers
looks for the ``kernels`` package of the Hugging Face hub, and Python 3.14 has a ``compression`` of its own.
"""

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec


def stand_back(name: str) -> None:
    """Load the package ``name`` from the rest of ``sys.path`` in place of the folder that is being imported.

    Where there is none the folder stays as an empty package of version 0. It must not raise: transformers imports a
    package that it finds without metadata, unguarded, and goes on without one whose version is too old.
    """
    root = os.path.dirname(os.path.realpath(__file__))
    spec = PathFinder.find_spec(name, [entry for entry in sys.path if os.path.realpath(entry) != root])
    if spec is None or spec.loader is None:
        vars(sys.modules[name]).update(__version__="0", __path__=[])
        return
    sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
