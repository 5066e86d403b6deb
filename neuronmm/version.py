"""The version of neuronmm, in a file because a plain checkout has no metadata; the packaging reads it too."""

VERSION = "0.1.0"
