"""Reversible, journaled weight residency for GPU inference workers."""

from __future__ import annotations
