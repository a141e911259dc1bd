"""Sharding rules: the legal states of inputs and outputs of an op on one mesh axis, and the op to run on local tensors.

Rules give raw rows over R, P and tensor dims (:mod:`node`); :func:`refine` decides gradients (states I, X, P, dims);
:func:`localise` rewrites size arguments; :func:`check` proves a row numerically; :class:`RuleBook` holds all of it, with
the :class:`Composite` functions (linear, attention, embedding, cross-entropy, dropout, batch norm) that are handled whole.

A plugin adds rules with an OpRuleSpec whose target is a mapping of op names to rules, or a Composite.  A rule says which
dims can be sharded; each row is proved numerically before it is used:

    def swiglu(view):
        for dim in range(len(view.in_shapes[0]) - 1):
            yield (dim,), (dim,)

    RULES = {"acme.swiglu": swiglu}
"""

from __future__ import annotations

from meshwright_dtensor.rules.book import RuleBook
from meshwright_dtensor.rules.composites.base import Composite, LocalContext
from meshwright_dtensor.rules.localise import localise
from meshwright_dtensor.rules.node import (
    NodeView,
    Row,
    Rule,
    RuleEntry,
    Slot,
    Strategy,
    finish,
    is_random,
    needs_data,
    refine,
    replicate,
)
from meshwright_dtensor.rules.verify_row import check

__all__ = [
    "Composite",
    "LocalContext",
    "NodeView",
    "Row",
    "Rule",
    "RuleBook",
    "RuleEntry",
    "Slot",
    "Strategy",
    "check",
    "finish",
    "is_random",
    "localise",
    "needs_data",
    "refine",
    "replicate",
]
