"""``python -m neuronmm``."""

import os
import sys

from neuronmm.cli import main, of_several

status = main()
if of_several():
    # A process of torchrun: threads of torch.distributed that outlive the group abort the end of the interpreter.
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)
sys.exit(status)
