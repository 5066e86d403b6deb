"""``python -m neuronmm``."""

import sys

from neuronmm.cli import main

sys.exit(main())
