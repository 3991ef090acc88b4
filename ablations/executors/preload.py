"""Imported once by the fork server, so that a cell's own process starts in milliseconds. Runs no tensor operation."""

import torch  # noqa: F401

import ablations.train  # noqa: F401
