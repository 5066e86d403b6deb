"""``python -m neuronmm``."""

import os
import sys

from neuronmm.cli import main

status = main()
if os.environ.get("WORLD_SIZE", "1") != "1":
    # A process of torchrun: threads of torch.distributed that outlive the group abort the end of the interpreter.
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)
sys.exit(status)
