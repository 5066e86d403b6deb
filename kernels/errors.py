"""The error of a kernel, in a module without torch so that the command line starts fast."""


class KernelError(RuntimeError):
    """A named implementation does not exist or does not support the call; the message gives the reason."""
