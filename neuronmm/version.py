"""The version of neuronmm, read from here by the packaging too: a plain checkout carries no metadata."""

VERSION = "0.1.0"
