"""Keep the folders at a checkout's root from shadowing other packages of the same names.

Their names are ``neuronmm.kernels``, ``neuronmm.compression`` and so on, but Python started in the root also finds them
under their bare names. Those belong to other packages: transformers imports ``kernels`` of the Hugging Face hub, and
``compression`` is in the standard library of Python 3.14.
"""

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec


def stand_back(name: str) -> None:
    """Replace the folder that is being imported by the package ``name`` elsewhere on ``sys.path``, not in a checkout.

    Without such a package the folder becomes an empty package of version 0. It must not raise: transformers imports any
    package that it finds, without a guard, and ignores one whose version is too old.
    """
    elsewhere = [entry for entry in sys.path if not os.path.exists(os.path.join(entry, os.path.basename(__file__)))]
    spec = PathFinder.find_spec(name, elsewhere)
    if spec is None or spec.loader is None:
        vars(sys.modules[name]).update(__version__="0", __path__=[])
        return
    sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
